"""Which layers of Megatron-LM's loop recompute, within a budget of memory.

Layers recompute by themselves there, as TransformerConfig says whenever a chunk computes. So a chunk of which autograd
may keep all computes with ``recompute_granularity`` None, and any other with "full". The program stays the same.

The backward of layers that recompute computes each of them again, and then holds what the layer would have kept from
its forward on. So one micro-batch tells both ways.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.cost.activations import ActivationBytes, ChunkBytes
from ds_lgamp.cost.budget import Decision, Pair, kept_within, space_left
from ds_lgamp.cost.memory import memory_over_time
from ds_lgamp.cost.units import ElementBytes, Sharding, UnitSize
from ds_lgamp.fields import with_unit
from ds_lgamp.integrations.program_spec import advise_on_memory, budget_of, over_budget
from ds_lgamp.partition.agreement import everyone
from ds_lgamp.partition.zero_partition import ZeroPartition, unit_sizes
from ds_lgamp.runtime.batch import ActionError
from ds_lgamp.runtime.chunk import tensors_in
from ds_lgamp.runtime.measure import PeakMemory, live_tensors, storage_of
from ds_lgamp.runtime.meter import ChunkMeter
from ds_lgamp.schedule.actions import COMPUTE, Action, Kind


def refuse_budget(settings: LgampConfig, config: Any) -> None:
    """Raises ConfigError for a budget of recomputation beside experts that ranks divide.

    Args:
        config: Megatron-LM's arguments, or a TransformerConfig.
    """
    ranks = getattr(config, "expert_model_parallel_size", None)
    if settings.recompute == "auto" and ranks not in (None, 1):
        raise ConfigError(
            f"{BLOCK}.recompute is 'auto', but expert_model_parallel_size is {ranks}: ranks with other tokens compute "
            "an expert together, and must recompute alike; use 'full' or 'none'"
        )


class _Stretch(NamedTuple):
    """Memory from one moment to the next, while a layer computes or between layers."""

    layer: nn.Module | None
    before: int
    peak: int
    after: int
    left_over: int = 0
    """Of a layer that computes: bytes of its result, which its successor keeps as an input, less those of its own input
    if that is such a result."""


class _Reading:
    """Measures a micro-batch on one chunk, whose layers recompute.

    Args:
        inputs: what another chunk has computed.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        self._layers = [layer for layer in model.modules() if isinstance(layer, TransformerLayer)]
        self._inputs = [(weakref.ref(storage_of(each)), each.nbytes) for each in inputs]
        self._memory = PeakMemory(only_new=True)
        self._blocks: list[list[_Stretch]] = []
        """The stretches of the forward, and of the backward."""
        self.result = self._held = self._outlives = 0
        """Bytes of what another chunk gets; of inputs that autograd has kept up to the backward; and of what was there
        before the backward and is still there after it, such as buffers that Megatron-core makes once."""

    @contextmanager
    def block(self) -> Iterator[None]:
        """Measures the operations inside the block."""
        self._blocks.append([])
        self._held = sum(size for storage, size in self._inputs if storage() is not None)
        self._before = self._memory.peak = self._memory.live()
        there = self._memory.storages()
        with ExitStack() as hooks, self._memory:
            for layer in self._layers:
                hooks.callback(layer.register_forward_pre_hook(lambda *_: self._cut(None)).remove)
                hooks.callback(layer.register_forward_hook(self._end_layer, with_kwargs=True).remove)
            yield
        self._cut(None)
        self._outlives = sum(storage.nbytes() for each in there if (storage := each()) is not None)

    def _end_layer(self, layer: nn.Module, given: Any, named: Any, result: Any) -> None:
        hidden, left_over = tensors_in((given, named))[0], tensors_in(result)[0].nbytes
        self._cut(layer, left_over if hidden.is_leaf else left_over - hidden.nbytes)

    def _cut(self, layer: nn.Module | None, left_over: int = 0) -> None:
        live = self._memory.live()
        self._blocks[-1].append(_Stretch(layer, self._before, max(live, self._memory.peak), live, left_over))
        self._before = self._memory.peak = live

    def chunk_bytes(self) -> ChunkBytes:
        """Returns the bytes of a chunk whose layers recompute, and those if they did not.

        What is left when the backward begins, and does not outlive it, is what autograd keeps.
        """
        forward, backward = self._blocks
        again = {stretch.layer: stretch for stretch in backward if stretch.layer is not None}
        more = most = 0
        for layer, before, peak, *_ in forward:
            if layer in again:
                stretch = again[layer]
                most = max(most, more + before + stretch.peak - stretch.before)
                more += stretch.after - stretch.before - stretch.left_over
            else:
                most = max(most, more + peak)
        whole = max(stretch.peak for stretch in backward) - backward[0].before
        saved = self._held + backward[0].before - self._outlives
        part = max(stretch.peak - stretch.before for stretch in backward if stretch.layer is None)
        kept = ChunkBytes(self.result, most, part, saved + more)
        peak = max(stretch.peak for stretch in forward)
        return ChunkBytes(self.result, peak, whole, saved, kept=kept)


class LayerMeter(ChunkMeter):
    """Measures the bytes that a micro-batch takes on chunks whose layers recompute by themselves. The executor has
    nothing to recompute, and tells it of backwards only."""

    def __init__(self) -> None:
        super().__init__()
        self._of_layers: dict[Pair, _Reading] = {}

    def is_outgrown(self, chunk: int, inputs: Any) -> bool:
        """Never, for the executor."""
        return False

    def begin_layers(self, pair: Pair, model: nn.Module, given: Any, received: Any) -> _Reading | None:
        """Returns the reading of a forward with a larger input than all before; None of any other.

        Args:
            given: what the model is called with.
            received: what another chunk has computed.
        """
        chunk, every = pair[0], (given, received)
        if not super().is_outgrown(chunk, every):
            return None
        self.outgrow(chunk, every)
        inputs = tensors_in(received)
        self.received[chunk] = max(self.received.get(chunk, 0), sum(each.nbytes for each in inputs))
        self._of_layers[pair] = _Reading(model, inputs)
        return self._of_layers[pair]

    def end_layers(self, pair: Pair, result: Any) -> None:
        """Reads the end of a forward, if it is measured: its ``result``, which another chunk gets."""
        if pair in self._of_layers:
            self._of_layers[pair].result = sum(each.nbytes for each in tensors_in(result))

    @contextmanager
    def backward(self, action: Action) -> Iterator[None]:
        reading = self._of_layers.pop((action.chunk, action.micro_batch), None)
        if reading is None:
            yield
            return
        with reading.block():
            yield
        self.enter(action.chunk, reading.chunk_bytes())

    def forget(self) -> None:
        """Drops what belongs to a batch that has ended."""
        self._of_layers.clear()


class Budget:
    """Decides for the chunks of a model on one rank which micro-batches autograd keeps.

    The first batch recomputes everything and measures. The second one knows the optimizer's state, too, and decides;
    later ones decide anew if something has grown.

    Args:
        settings: the block.
        device: of the model.
        groups: those of the model.
        chunks: how many the whole model has.
        partition: that of sharded chunks; None of whole ones, whose state stays the same all through a batch.
    """

    def __init__(
        self,
        settings: LgampConfig,
        device: torch.device,
        groups: ProcessGroupCollection,
        chunks: int,
        partition: ZeroPartition | None,
    ) -> None:
        self._given, self._device, self._groups = budget_of(settings, device.type), device, groups
        self._chunks, self._batches, self.meter = chunks, 0, LayerMeter()
        self._state = _state_of(partition) if partition is not None and partition.units else _State()
        self._state_stays = partition is None or not partition.units or not partition.units[0].policy.partitioned
        """Whether nothing of the state goes after a batch: the first one makes gradients, and later ones find them."""
        self._program: Sequence[Action] = ()
        """What was decided last is for this one."""
        self._held = self._unseen = 0
        """Bytes on the device before a batch, at most; and those of the first batch that nobody saw come."""
        self.kept: frozenset[Pair] = frozenset()

    def begin_batch(self, program: Sequence[Action]) -> None:
        """Decides, if there is a reason. In the second batch, raises ConfigError on all ranks of the model if
        recomputing everything takes more than the budget.

        Args:
            program: that of this rank.
        """
        held, is_first, is_second = self._on_device(), self._batches == 0, self._batches == 1
        if is_first and self._device.type != "cpu":
            torch.get_device_module(self._device).reset_peak_memory_stats(self._device)
        grows = program != self._program or self.meter.has_grown or held > self._held
        self._held, self._batches = max(held, self._held), self._batches + 1
        if is_second and self._state_stays:
            self._state = _State()
        # Ranks that share layers compute together, so they decide together.
        shared = [group for group in (self._groups.tp, self._groups.cp) if group.size() > 1]
        for group in shared:
            grows = any(everyone(grows, group))
        if is_first or not grows:
            return
        self._program, self.meter.has_grown = program, False
        limit, build = self._limit(), partial(_marked, program)
        if is_second:
            self._refuse(over_budget(limit, dist.get_rank(), max(self._during(build(Decision())))))
        self.kept = kept_within(limit, build, self._during, self._size).kept
        for group in shared:
            self.kept = frozenset.intersection(*everyone(self.kept, group))
        self._tell(limit)

    def end_batch(self, program: Sequence[Action]) -> None:
        """Ends a batch. The first one tells how much of its peak nobody saw come."""
        self.meter.forget()
        if self._batches == 1 and self._device.type != "cpu":
            peak = torch.get_device_module(self._device).max_memory_allocated(self._device)
            self._unseen = max(0, peak - max(self._during(_marked(program, Decision()))))

    @contextmanager
    def forward(self, pair: Pair, model: nn.Module, received: Any) -> Iterator[None]:
        """Lets the layers of ``model`` recompute, or not, in the forward inside the block.

        Args:
            received: what another chunk has computed.
        """
        with ExitStack() as stack:

            def look(_: nn.Module, positional: Any, named: Any) -> None:
                """Only its call shows the data of a model."""
                reading = self.meter.begin_layers(pair, model, (positional, named), received)
                if reading is not None:
                    stack.enter_context(reading.block())
                elif pair in self.kept:
                    stack.enter_context(_keeping(model))

            stack.callback(model.register_forward_pre_hook(look, with_kwargs=True).remove)
            yield

    def advise(self, error: ActionError, row: int) -> None:
        """Raises an ActionError in place of one that says that the device had too little memory. It also says what to
        do.

        Args:
            row: the place of the action that failed.
        """
        if not isinstance(error.__cause__, torch.OutOfMemoryError):
            return
        decisions = Decision(self.kept), Decision()
        fitted, needed = (self._during(_marked(self._program, each)) for each in decisions)
        peaks = max(fitted[:row], default=0), max(needed, default=0)
        advise_on_memory(error, len(self.kept), self._limit(), *peaks)

    def _limit(self) -> int:
        if self._given is not None:
            return self._given
        module = torch.get_device_module(self._device)
        return space_left(module.mem_get_info(self._device)[0] + module.memory_reserved(self._device))

    def _on_device(self) -> int:
        """Returns the bytes of all tensors on the device."""
        if self._device.type != "cpu":
            return torch.get_device_module(self._device).memory_allocated(self._device)
        storages = {storage_of(each)._cdata: storage_of(each).nbytes() for each in live_tensors() if each.is_cpu}
        return sum(storages.values())

    @property
    def _size(self) -> ActivationBytes:
        """Returns what was measured."""
        own, received = self.meter.chunks, self.meter.received
        sizes = [own.get(chunk, ChunkBytes(received.get(chunk + 1, 0), 0, 0)) for chunk in range(self._chunks)]
        return ActivationBytes(0, 0, sizes, by_layers=True)

    def _during(self, actions: Sequence[Action]) -> list[int]:
        """Returns the peak on the device during each action: by the formula, but with what is there before a batch in
        place of its weights and the optimizer's state."""
        units, sharding, element = self._state
        memory, during = memory_over_time(actions, units, sharding, element, self._size)
        beyond = self._held + self._unseen - memory.weights - memory.master_weights
        return [beyond + most for most in during]

    def _refuse(self, complaint: str | None) -> None:
        """Raises ConfigError on every rank of the model if one has a ``complaint``."""
        for group in (self._groups.tp, self._groups.dp_cp, self._groups.pp):
            complaint = next((each for each in everyone(complaint, group) if each), None)
        if complaint is not None:
            raise ConfigError(complaint)

    def _tell(self, limit: int) -> None:
        """Says on the first rank what it recomputes from now on."""
        if dist.get_rank() == 0:
            forwards = sum(action.kind is Kind.FORWARD for action in self._program)
            print(
                f"ds_lgamp: within {with_unit(limit, 'B')} of memory, rank 0 recomputes {forwards - len(self.kept)} of "
                f"{forwards} forwards of a step",
                flush=True,
            )


class _State(NamedTuple):
    """What the formula of memory follows beside activations."""

    units: Sequence[UnitSize] = ()
    sharding: Sharding = Sharding(0, 1)
    element: ElementBytes = ElementBytes()


def _state_of(partition: ZeroPartition) -> _State:
    policy, first = partition.units[0].policy, partition.units[0].storage.parameters[0].parameter
    group, weights = policy.data_group, first.element_size()
    gradients = weights if policy.gradient_dtype is None else policy.gradient_dtype.itemsize
    sharding = Sharding(policy.zero_stage, group.size(), all_to_all=dist.get_backend(group) == "gloo")
    return _State(unit_sizes(partition), sharding, ElementBytes(weights, gradients))


def _marked(program: Sequence[Action], decision: Decision) -> list[Action]:
    """Returns the program with the forwards and backwards marked whose layers recompute."""
    kept = decision.kept
    return [action._replace(recomputed=action.kind in COMPUTE and action[1:3] not in kept) for action in program]


@contextmanager
def _keeping(model: nn.Module) -> Iterator[None]:
    """Lets no layer of ``model`` recompute inside the block."""
    configs: dict[int, Any] = {id(each): each for each in (getattr(part, "config", None) for part in model.modules())}
    recomputing = [each for each in configs.values() if getattr(each, "recompute_granularity", None) == "full"]
    for each in recomputing:
        each.recompute_granularity = None
    try:
        yield
    finally:
        for each in recomputing:
            each.recompute_granularity = "full"
