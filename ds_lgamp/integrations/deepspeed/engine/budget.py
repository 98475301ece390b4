"""Which forwards a rank recomputes to stay within a budget of memory: recompute "auto"."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.utils import groups as stock_groups
from deepspeed.utils import logger
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.cost.activations import ActivationBytes, ChunkBytes
from ds_lgamp.cost.budget import Decision, kept_within, space_left
from ds_lgamp.cost.memory import Memory, memory_over_time
from ds_lgamp.cost.units import ElementBytes
from ds_lgamp.fields import with_unit
from ds_lgamp.integrations.deepspeed.engine.memory import element_bytes, update_of
from ds_lgamp.integrations.deepspeed.model.experts import divided
from ds_lgamp.integrations.deepspeed.model.shared_tensors import tensor_group
from ds_lgamp.integrations.program_spec import advise_on_memory, over_budget
from ds_lgamp.partition.agreement import raise_everywhere
from ds_lgamp.partition.zero_partition import unit_sizes
from ds_lgamp.runtime.batch import ActionError
from ds_lgamp.runtime.meter import ChunkMeter, RepeatedParts
from ds_lgamp.runtime.recompute import read_states
from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.schedule.program import build_rank_program
from ds_lgamp.schedule.spec import ProgramSpec


def shared_by_ranks(module: PipelineModule, layers: nn.Module) -> str | None:
    """Returns what ranks share if ``layers``, of this rank or of all, exchange data inside a chunk, as a clause; None
    if they do not."""
    parts = [*layers.modules()]
    shared = {
        "ranks divide layers among each other": tensor_group(module) is not None or bool(divided(layers)),
        "ranks share a SyncBatchNorm": any(isinstance(each, nn.SyncBatchNorm) for each in parts),
        "ranks share a sequence": stock_groups._get_sequence_parallel_world_size() > 1,
    }
    return next((reason for reason, holds in shared.items() if holds), None)


def why_not_alone(module: PipelineModule, layers: nn.Module) -> str | None:
    """Returns a sentence if the ranks of "auto" must not decide alone what they recompute, because ``layers`` exchange
    data with other ranks, or if one cannot be measured; else None."""
    shared = shared_by_ranks(module, layers)
    found = None if shared is None else f"{shared} and must recompute alike"
    if found is None and any(each._compiled_call_impl is not None for each in layers.modules()):
        found = "a layer is compiled, which cannot be measured"
    return None if found is None else f"{BLOCK}.recompute is 'auto', but {found}; use 'full' or 'none'"


class Budget:
    """Decides for a rank which forwards autograd keeps, so that the rank stays within its budget.

    The first batch recomputes everything and measures. Later forwards with a larger input than all before are measured
    as well. Each rank decides alone, because no layer exchanges data with other ranks (:func:`why_not_alone`).

    Args:
        training: the training of this rank.
        given: the bytes that tensors may take; None for what the device has left.
    """

    def __init__(self, training: Any, given: int | None) -> None:
        self._training, self._given = training, given
        chunks, sources = training.executor.chunks, training.random_sources
        parts = {number: RepeatedParts(chunk, sources) for number, chunk in chunks.items() if chunk.switches}
        self._meter = training.executor.meter = ChunkMeter(training.settings.activation_dtype, parts)
        self._batch = 0, 0
        """Bytes of the inputs and the labels of a micro-batch."""
        self._measured = 0
        """The peak of the device up to the first step, without the optimizer's state; 0 on a CPU."""
        self._budget = 0
        """The bytes that tensors may take, once they are known."""
        self._limit: int | None = None
        """The budget for what the formula covers; None before the end of the first batch."""
        self._decided: tuple[ProgramSpec | None, Decision] = None, Decision()
        """What was decided last, and for which program."""
        self._is_open = False
        """Whether a batch has begun, whose program may get longer or shorter, but stay as it is up to here."""

    def marked(self, spec: ProgramSpec) -> ProgramSpec:
        """Returns the program of a step with what autograd keeps of it."""
        if self._limit is None:
            return spec
        decided = self._decided[0]
        if not self._is_open and (spec != decided or self._meter.has_grown):
            if decided is not None and spec.first_trained < decided.first_trained:
                self._meter.measure_again()
            self._meter.has_grown = False
            self._decided = spec, kept_within(self._limit, partial(self._build, spec), self._during, self._size)
        return replace(spec, **self._decided[1]._asdict())

    def begin_anew(self) -> None:
        """Lets the next batch be as the first one, because other tensors may need gradients."""
        self._meter.measure_again()
        self._limit, self._decided = None, (None, Decision())

    def begin_batch(self) -> None:
        """Begins a batch for training."""
        self._is_open = True
        self._batch = tuple(map(max, self._batch, self._training.loader.sizes()))
        if self._limit is None and self._on_accelerator:
            get_accelerator().reset_peak_memory_stats()

    def before_step(self) -> None:
        """Reads the peak of the first batch, before the optimizer takes temporary memory."""
        if self._limit is None and self._on_accelerator:
            self._measured = get_accelerator().max_memory_allocated() - self._optimizer_state()

    def end_batch(self, spec: ProgramSpec) -> None:
        """Ends a batch with the program of ``spec``. Collective over all ranks after the first one, which may raise
        ConfigError on every rank: then it has taken more than the budget although it recomputed everything."""
        self._is_open = False
        if self._limit is not None:
            return
        needed, beyond = max(self._during(self._build(spec, Decision()))), self._beyond(spec)
        budget = self._budget = self._left() if self._given is None else self._given
        raise_everywhere(over_budget(budget, dist.get_rank(), needed + beyond), ConfigError)
        self._limit = budget - beyond
        self._tell(self.marked(spec), budget)

    def advise(self, error: BaseException) -> None:
        """Raises an ActionError in place of one that says that the device had too little memory. It also says what to
        do."""
        if not isinstance(error, ActionError) or not isinstance(error.__cause__, torch.OutOfMemoryError):
            return
        executor, (spec, decision) = self._training.executor, self._decided
        fitted = needed = 0
        if spec is not None and self._limit is not None:
            beyond = self._budget - self._limit
            fitted = beyond + max(self._during(executor.program)[: executor.row], default=0)
            needed = beyond + max(self._during(self._build(spec, Decision())))
        advise_on_memory(error, len(decision.kept), self._budget, fitted, needed)

    @property
    def _on_accelerator(self) -> bool:
        return self._training.device.type != "cpu"

    @property
    def _size(self) -> ActivationBytes:
        """What was measured."""
        training, meter = self._training, self._meter
        own, chunks = meter.chunks, training.program_spec.chunks
        others = {
            chunk: ChunkBytes(meter.inputs.get(chunk + 1, 0), 0, 0, sent=meter.received.get(chunk + 1))
            for chunk in range(chunks)
        }
        sources = [] if training.settings.reproducible or self._on_accelerator else training.random_sources
        states = [each for each in tree_leaves(read_states(sources)) if isinstance(each, torch.Tensor)]
        inputs, labels = self._batch
        return ActivationBytes(
            inputs=max(inputs, meter.inputs.get(0, 0)),
            labels=labels,
            chunks=[
                replace(own.get(chunk, others[chunk]), selective=meter.selective.get(chunk)) for chunk in range(chunks)
            ],
            random_states=sum(state.nbytes for state in states),
            draws=training.executor.draws.any,
        )

    def _build(self, spec: ProgramSpec, decision: Decision) -> list[Action]:
        return build_rank_program(replace(spec, **decision._asdict()), self._training.placed.stage_id)

    def _during(self, actions: Sequence[Action]) -> list[int]:
        return self._follow(actions)[1]

    def _follow(self, actions: Sequence[Action]) -> tuple[Memory, list[int]]:
        """Returns the memory of this rank by the formula, and the peak during each action."""
        training, offload = self._training, self._training.program_spec.offload
        units = unit_sizes(training.partition, training.home_of_frozen)
        return memory_over_time(actions, units, training.sharding, self._element, self._size, offload=offload)

    @cached_property
    def _element(self) -> ElementBytes:
        training = self._training
        update = update_of(training.door.optimizer.optimizer, None)
        return element_bytes(training.config, update, training.travel, training.settings.stochastic_rounding)

    def _beyond(self, spec: ProgramSpec) -> int:
        """Returns the bytes on the device that the formula does not cover, such as data of the script, and the state of
        an optimizer if its size was unknown."""
        unknown = self._optimizer_state() if self._element.optimizer is None else 0
        if not self._on_accelerator:
            return unknown
        actions = self._build(spec, Decision())
        memory, during = self._follow(actions)
        before_step = [action.kind for action in actions].index(Kind.STEP)
        return unknown + max(0, self._measured - max(during[:before_step]) + (memory.optimizer_state or 0))

    def _optimizer_state(self) -> int:
        """Returns the bytes that the optimizer keeps on the device now."""
        training = self._training
        tensors = tree_leaves(list(training.door.optimizer.state.values()))
        held = [each for each in tensors if isinstance(each, torch.Tensor) and each.device == training.device]
        return 0 if training.program_spec.offload is not None else sum(each.nbytes for each in held)

    def _left(self) -> int:
        """Returns the bytes that tensors may take of what the device has left."""
        accelerator = get_accelerator()
        return space_left(accelerator.available_memory() + accelerator.memory_reserved())

    def _tell(self, spec: ProgramSpec, budget: int) -> None:
        """Says on the first rank what it recomputes from now on."""
        if dist.get_rank() == 0:
            program = build_rank_program(spec, self._training.placed.stage_id)
            backwards = [action for action in program if action.kind is Kind.BACKWARD]
            in_part = sum(action.selective for action in backwards)
            logger.info(
                f"ds_lgamp: within {with_unit(budget, 'B')} of memory, rank 0 recomputes "
                f"{sum(action.recomputed for action in backwards)} of {len(backwards)} forwards of a step"
                f"{f', and a part of {in_part} more' if in_part else ''}"
            )
