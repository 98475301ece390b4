"""Predicts what the step of LAMB or Muon communicates, and the memory of Muon's, before anything runs."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_lgamp.cost.matrices import Matrix, exchange_bytes
from ds_lgamp.cost.muon import Iteration, step_memory
from ds_lgamp.cost.storage import offsets
from ds_lgamp.integrations.deepspeed.config.optimizer_choice import choose_optimizer, counterpart, kernels_of
from ds_lgamp.integrations.deepspeed.explain.model_sizes import ModelSizes
from ds_lgamp.optimizers.lamb import Lamb
from ds_lgamp.optimizers.muon import DEFAULTS, Muon
from ds_lgamp.optimizers.newton_schulz import NewtonSchulz

_NORMS, _EXACT_NORMS = (2 * 8,), (2 * 8, 2 * 3 * 8)
"""Bytes of what LAMB adds up of each tensor, by collective: two squares or, to the bit, two maxima and six counts."""


class UpdateTraffic(NamedTuple):
    """The collectives of an optimizer's step on one pipeline rank, without tensor parallelism."""

    collectives: int = 0
    sent: int = 0
    """Bytes that the data-parallel rank with most sends."""


class Rule(NamedTuple):
    """What an optimizer needs of tensors."""

    kind: type | None = None
    """Lamb, Muon or None for one that needs nothing."""
    blocks: Callable[[str, nn.Parameter], int] = lambda name, parameter: 0
    """How many matrices Muon makes orthogonal in a parameter; 0 if AdamW updates it."""
    iteration: Iteration = Iteration()
    """How it does."""
    others_in_place: bool = False
    """Whether Muon's AdamW takes no temporary memory."""


def rule_of(optimizer: Any, config: Any) -> Rule:
    """Returns the rule of the user's ``optimizer``, or of the one that ``config``, a DeepSpeedConfig, names.

    Parameters of layers that this process has not built belong to Muon if DeepSpeed would mark them so.
    """
    device = torch.device(get_accelerator().current_device_name())
    if optimizer is None:
        choice = choose_optimizer(config.optimizer_name, config.optimizer_params or {}, device, kernels_of(device))
        if choice.kind is not Muon:
            return Rule(choice.kind)
        return Rule(
            Muon,
            lambda name, parameter: int(is_hidden_matrix(name, parameter)),
            _iteration({**DEFAULTS, **choice.options["matrices"]}, device),
            bool(choice.options["others"].get("fused")),
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        return Rule()
    group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    own = next((group for group in optimizer.param_groups if group.get("use_muon", True)), {})
    others = [group for group in optimizer.param_groups if not group.get("use_muon", True)]

    def blocks(name: str, parameter: nn.Parameter) -> int:
        group = group_of.get(id(parameter))
        if group is None:
            return int(is_hidden_matrix(name, parameter))
        return group.get("blocks", 1) if group.get("use_muon", True) else 0

    # torch's Muon has no method. Its numbers are those of the standard one.
    iteration = _iteration({**DEFAULTS, "ns_method": "standard", **own}, device)
    return Rule(counterpart(type(optimizer)), blocks, iteration, all(group.get("fused") for group in others))


def _iteration(group: dict[str, Any], device: torch.device) -> Iteration:
    """Returns the iteration of a group of matrices."""
    made = NewtonSchulz(group["ns_method"])
    types = made.input_dtype.itemsize, made.output_dtype(device).itemsize
    return Iteration(made.method, group["ns_steps"], group["nesterov"], *types)


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether DeepSpeed would mark a parameter with ``use_muon``."""
    return parameter.dim() > 1 and not any(word in name.lower() for word in ("embed", "lm_head"))


def update_traffic(
    model: ModelSizes, rank: int, rule: Rule, zero_stage: int, data_ranks: int, in_rank_order: bool
) -> UpdateTraffic:
    """Returns what the step communicates on a pipeline rank. With ``in_rank_order``, results must not depend on how
    tensors are cut."""
    units = list(_units(model, rank))
    if data_ranks == 1 or rule.kind not in (Lamb, Muon):
        return UpdateTraffic()
    if rule.kind is Lamb:
        tensors = sum(map(len, units))
        if zero_stage == 0 or tensors == 0:
            return UpdateTraffic()
        kinds = _EXACT_NORMS if in_rank_order else _NORMS
        return UpdateTraffic(len(kinds), sum(2 * size * tensors * (data_ranks - 1) // data_ranks for size in kinds))
    matrices = [matrix for unit in units for matrix in _matrices(unit, rule)]
    if not matrices:
        return UpdateTraffic()
    types = rule.iteration.leaving, rule.iteration.returning
    return UpdateTraffic(2 if zero_stage > 0 else 1, max(exchange_bytes(matrices, zero_stage, data_ranks, *types)))


def update_memory(model: ModelSizes, rank: int, rule: Rule, zero_stage: int, data_ranks: int) -> int | None:
    """Returns the bytes that Muon's step takes for a moment on a pipeline rank with one tensor-parallel rank; None for
    other optimizers, or if AdamW's step on other tensors takes memory too."""
    if rule.kind is not Muon or not rule.others_in_place:
        return None
    units = [list(_matrices(unit, rule)) for unit in _units(model, rank)]
    return step_memory(units, zero_stage, data_ranks, rule.iteration)


def _units(model: ModelSizes, rank: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Yields the parameters that train of every unit, in the order of the partition."""
    seen = set()
    for chunk in model.layout.chunks_of(rank):
        layers = model.layout.layers(chunk)
        yield [named for layer in layers if model.keys[layer] is None for named in _trained(model, layer, str(layer))]
        for layer in layers:
            key = model.keys[layer]
            if key is not None and key not in seen:
                seen.add(key)
                yield list(_trained(model, layer, f"tied_modules.{key}"))


def _trained(model: ModelSizes, layer: int, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
    if isinstance(model.layers[layer], nn.Module):
        for name, parameter in model.layers[layer].named_parameters():
            if parameter.requires_grad:
                yield f"{prefix}.{name}", parameter


def _matrices(unit: list[tuple[str, nn.Parameter]], rule: Rule) -> Iterator[Matrix]:
    """Yields the matrices of a unit. They come first in its storage, because their group does."""
    ordered = sorted(unit, key=lambda named: rule.blocks(*named) == 0)
    *starts, end = offsets(parameter.numel() for _, parameter in ordered)
    for (name, parameter), start in zip(ordered, starts):
        blocks = rule.blocks(name, parameter)
        if blocks:
            yield Matrix(len(parameter), parameter.numel() // len(parameter), start, end, blocks)
