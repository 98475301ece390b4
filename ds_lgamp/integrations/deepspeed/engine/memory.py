"""What the formula of memory needs to know of a rank: bytes per element, and what is known of an optimizer before it
takes a step: its state, its temporary memory, and what LAMB or Muon send.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_lgamp.config import LgampConfig
from ds_lgamp.cost.muon import Iteration, Matrix, exchange_bytes, step_memory
from ds_lgamp.cost.units import ElementBytes, Sharding, Travel
from ds_lgamp.integrations.deepspeed.config.optimizer_choice import ELEMENTWISE, choice_of, counterpart
from ds_lgamp.integrations.deepspeed.config.precision import accumulation_dtype, has_master_copies, parameter_dtype
from ds_lgamp.optimizers.lamb import Lamb
from ds_lgamp.optimizers.muon import DEFAULTS, Muon, NewtonSchulz
from ds_lgamp.optimizers.rounding import InEightBits
from ds_lgamp.partition.unit import parts_of
from ds_lgamp.partition.zero_partition import ZeroPartition
from ds_lgamp.schedule.spec import ProgramSpec

LATER = "given later"
"""The name of an optimizer that the script gives after ``deepspeed.initialize`` has been explained."""
_NORMS, _EXACT_NORMS = (2 * 8,), (2 * 8, 2 * 3 * 8)
"""Bytes of what LAMB adds up of each tensor, by collective: two squares or, to the bit, two maxima and six counts."""


def comes_later(_parameters: Any) -> NoReturn:
    """Stands for the function that makes an optimizer in explanations of a script that gives it later. Explanations
    make no optimizer."""
    raise AssertionError


class UpdateTraffic(NamedTuple):
    """The collectives of an optimizer's step on one pipeline rank, without tensor parallelism."""

    collectives: int = 0
    sent: int = 0
    """Bytes that the data-parallel rank with most sends."""


class Update:
    """The step of an optimizer.

    Args:
        name: that of the optimizer, for people.
        kind: its class; None if it is unknown.
        groups: its options, by parameter group.
    """

    def __init__(self, name: str, kind: type | None, groups: Sequence[dict[str, Any]]) -> None:
        self.name = name
        self._kind = None if kind is None else counterpart(kind)
        """Lamb or Muon, which need whole tensors; None for other optimizers."""
        self.in_8_bits: InEightBits | None = None
        """The optimizer, if its state has 8 bits."""
        self._groups = groups
        self._group_of = {id(parameter): index for index, group in enumerate(groups) for parameter in group["params"]}
        counts = [None] if kind is None else [state_tensors(kind, group) for group in groups]
        self.state_tensors = None if None in counts else max(count for count in counts if count is not None)
        """How many tensors of a parameter's shape it keeps; None if unknown."""
        self.temporary_tensors = None
        """How many tensors of the shape of one unit's part its step takes for a moment; None if unknown."""
        if self._kind is Lamb:
            self.temporary_tensors = 1
        elif kind is not None and all(updates_in_place(kind, group) for group in groups):
            self.temporary_tensors = 0

    @property
    def needs_whole_tensors(self) -> bool:
        """Whether it is LAMB or Muon, or has state of 8 bits, of which blocks of a tensor share a scale."""
        return self._kind is not None or self.in_8_bits is not None

    def group_of(self, name: str, parameter: nn.Parameter) -> int:
        """Returns the group of a parameter that trains. Those of layers that this process has not built belong to
        Muon's matrices if DeepSpeed would mark them with ``use_muon``."""
        if self._kind is not Muon:
            return 0
        is_hidden = parameter.dim() > 1 and not any(word in name.lower() for word in ("embed", "lm_head"))
        alike = (index for index in range(len(self._groups)) if (self._blocks(index) > 0) == is_hidden)
        return self._group_of.get(id(parameter), next(alike, len(self._groups)))

    def _blocks(self, group: int) -> int:
        """Returns how many matrices Muon makes orthogonal in each parameter of a group; 0 if AdamW updates them."""
        options = {"use_muon": False} if group == len(self._groups) else self._groups[group]
        return options.get("blocks", 1) if options.get("use_muon", True) else 0

    def traffic(self, partition: ZeroPartition, zero_stage: int, data_ranks: int, in_rank_order: bool) -> UpdateTraffic:
        """Returns what the step communicates on a pipeline rank. With ``in_rank_order``, results must not depend on how
        tensors are cut."""
        if data_ranks == 1:
            return UpdateTraffic()
        if self._kind is Lamb and zero_stage > 0:
            tensors = sum(len(unit.storage.parameters) for unit in partition.units if unit.trains)
            kinds = _EXACT_NORMS if in_rank_order else _NORMS
            sent = sum(2 * size * tensors * (data_ranks - 1) // data_ranks for size in kinds)
            return UpdateTraffic(len(kinds), sent) if tensors else UpdateTraffic()
        matrices = [matrix for of_segment in self._matrices(partition) for matrix in of_segment]
        if not matrices:
            return UpdateTraffic()
        iteration = self._iteration()
        by_rank = exchange_bytes(matrices, zero_stage, data_ranks, iteration.leaving, iteration.returning)
        return UpdateTraffic(2 if zero_stage > 0 else 1, max(by_rank))

    def memory(self, partition: ZeroPartition, zero_stage: int, data_ranks: int) -> int | None:
        """Returns the bytes that Muon's step takes for a moment on a pipeline rank with one tensor-parallel rank; None
        for other optimizers, or if AdamW's step on other tensors takes memory too."""
        others = [group for index, group in enumerate(self._groups) if not self._blocks(index)]
        if self._kind is not Muon or not all(group.get("fused") for group in others):
            return None
        return step_memory(self._matrices(partition), zero_stage, data_ranks, self._iteration())

    def _iteration(self) -> Iteration:
        device = torch.device(get_accelerator().current_device_name())
        own = next((group for index, group in enumerate(self._groups) if self._blocks(index)), {})
        # torch's Muon has no method. Its numbers are those of the standard one.
        options = {**DEFAULTS, "ns_method": "standard", **own}
        made = NewtonSchulz(options["ns_method"])
        types = made.input_dtype.itemsize, made.output_dtype(device).itemsize
        return Iteration(made.method, options["ns_steps"], options["nesterov"], *types)

    def _matrices(self, partition: ZeroPartition) -> list[list[Matrix]]:
        """Returns the matrices of every segment, in the order in which the step takes them: by group, then by unit."""
        segments: dict[tuple[int, int], list[Matrix]] = {}
        for number, unit in enumerate(partition.units if self._kind is Muon else ()):
            for part in parts_of(unit):
                if part.group is not None and (blocks := self._blocks(part.group)):
                    rows, start, end = part.shape[0], part.in_flat.start, unit.storage.end
                    matrix = Matrix(rows, part.shape.numel() // rows, start, end, blocks)
                    segments.setdefault((part.group, number), []).append(matrix)
        return [segments[place] for place in sorted(segments)]


def update_of(optimizer: Any, config: Any) -> Update:
    """Returns the step of the user's ``optimizer``, or of the one that ``config``, a DeepSpeedConfig, names."""
    if isinstance(optimizer, torch.optim.Optimizer):
        update = Update(type(optimizer).__name__, type(optimizer), optimizer.param_groups)
        update.in_8_bits = optimizer if isinstance(optimizer, InEightBits) else None
        return update
    if optimizer is not None:
        return Update(LATER if optimizer is comes_later else "made by a function", None, [])
    device = torch.device(get_accelerator().current_device_name())
    choice = choice_of(config, device)
    groups = [choice.options]
    if choice.kind is Muon:
        matrices, others = {**DEFAULTS, **choice.options["matrices"]}, choice.options["others"]
        groups = [{**matrices, "use_muon": True}, {**others, "use_muon": False}]
    return Update(choice.kind.__name__, choice.kind, [{"params": [], **group} for group in groups])


def state_tensors(kind: type, options: dict[str, Any]) -> int | None:
    """How many tensors of each parameter's shape the optimizer keeps; None if that is unknown."""
    name = kind.__name__
    if issubclass(kind, InEightBits):
        return kind.tensors
    if name == "SGD":
        return int(bool(options.get("momentum")))
    if name == "RMSprop":
        return 1 + bool(options.get("momentum")) + bool(options.get("centered"))
    if kind is Muon or name == "MuonWithAuxAdam":
        return 1 if options.get("use_muon") else 2
    if name in ("Adam", "AdamW"):
        return 3 if options.get("amsgrad") else 2
    if name in ("FusedAdam", "DeepSpeedCPUAdam", "DeepSpeedCPULion", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop"):
        return 2
    if name.lower() in ("lamb", "fusedlamb"):
        return 2
    return 1 if name in ("Adagrad", "ASGD", "Muon", "DeepSpeedCPUAdagrad", "FusedLion") else None


def updates_in_place(kind: type, options: dict[str, Any]) -> bool:
    """Whether a step needs no memory for temporary tensors."""
    if counterpart(kind) is not None:
        return False
    from_outside = kind.__module__.partition(".")[0] in ("deepspeed", "apex")
    return from_outside or (kind in ELEMENTWISE and bool(options.get("fused")))


def sharding_of(spec: ProgramSpec, settings: LgampConfig, data_ranks: int) -> Sharding:
    """Returns how so many data-parallel ranks share what the model consists of."""
    exact = settings.reproducible
    all_to_all = exact or get_accelerator().communication_backend_name() == "gloo"
    return Sharding(spec.zero_stage, data_ranks, spec.hierarchy, all_to_all, exact)


def element_bytes(config: Any, update: Update, travel: Travel, rounds: bool) -> ElementBytes:
    """Returns the bytes per element under a DeepSpeedConfig. With ``rounds``, updates round by chance."""
    weights, gradients = parameter_dtype(config), accumulation_dtype(config)
    travelling = config.communication_data_type or gradients
    size = ElementBytes(
        weights.itemsize,
        gradients.itemsize,
        communication=None if travelling == gradients else travelling.itemsize,
        copies_weights=has_master_copies(config),
    )
    state, temporary = (
        None if tensors is None else tensors * (size.master if update.in_8_bits is None else 4)
        for tensors in (update.state_tensors, update.temporary_tensors)
    )
    narrow = update.in_8_bits is not None
    size = replace(size, optimizer=state, update=temporary, travel=travel, state_in_8_bits=narrow)
    return size.rounding_by_chance() if rounds else size
