"""Trains contenders on real ranks and counts, at dispatch, what one step moves and holds."""

import gc
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.contenders import Contender, Layout
from benchmarks.model import reference_losses
from benchmarks.record import REPETITIONS
from ds_lgamp.runtime.measure import CollectiveCounter, PeakMemory, live_tensors, storage_of
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks

ENGINES_PER_SPAWN = 10
"""Every engine has process groups of its own; with very many in one process, gloo stalls."""
SPAWN_SECONDS = 1200
WARM_UP = 2
"""Steps ahead of those that are counted, for each number of micro-batches: DeepSpeed's ZeRO-3 still learns the order
of the layers in its second micro-batch."""
LOSS_TOLERANCE = 1e-5
"""Relative. In fp32, orders of summation differ by less."""


class HeldBlocks(TorchDispatchMode):
    """The most blocks whose full parameters were there after any operation."""

    def __init__(self, held: Callable[[], int]) -> None:
        super().__init__()
        self.most, self._held = 0, held

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.most = max(self.most, self._held())
        return result


@dataclass
class Step:
    """What one step did on one rank."""

    log: list[tuple[str, int]]
    """Kind (as :class:`CollectiveCounter` names them) and bytes sent of every call."""
    peak_bytes: int


@dataclass
class Counted:
    """A contender's counted steps."""

    losses: list[float | None] = field(default_factory=list)
    """Of all steps."""
    steps: dict[int, list[Step]] = field(default_factory=dict)
    """By micro-batches per step."""
    held: dict[int, int] = field(default_factory=dict)
    """The most blocks whose full parameters were there at once, by micro-batches per step."""


def count(
    contenders: Sequence[Contender],
    layout: Layout,
    micro_batches: Sequence[int],
    memory: bool = False,
    repetitions: int = REPETITIONS,
) -> dict[str, list[Counted]]:
    """By contender, what every rank counted; ahead of what is counted go ``WARM_UP`` steps.

    Args:
        memory: whether bytes of live tensors are counted too, which is slow.

    Raises AssertionError if the losses of a contender differ from those of one process.
    """
    ranks = layout.pipeline_ranks * layout.data_ranks
    sequence = tuple(number for number in micro_batches for _ in range(WARM_UP + repetitions))
    expected = reference_losses(layout.size, layout.data_ranks, sequence)
    found: dict[str, list[Counted]] = {}
    for start in range(0, len(contenders), ENGINES_PER_SPAWN):
        members = contenders[start : start + ENGINES_PER_SPAWN]
        arguments = members, layout, micro_batches, memory, repetitions
        for on_rank in run_on_ranks(ranks, _count_on_rank, *arguments, seconds=SPAWN_SECONDS):
            for contender, counted in zip(members, on_rank):
                found.setdefault(contender.name, []).append(counted)
    for name, on_ranks in found.items():
        for counted in on_ranks:
            check_losses(name, counted.losses, expected)
        unknown = [
            step for step, losses in enumerate(zip(*(counted.losses for counted in on_ranks))) if not any(losses)
        ]
        assert not unknown, f"no rank knows the loss of {name} in steps {unknown}"
    return found


def check_losses(contender: str, losses: Sequence[float | None], expected: Sequence[float]) -> None:
    """Raises AssertionError where a contender trained something else."""
    for step, (loss, right) in enumerate(zip(losses, expected, strict=True)):
        if loss is not None and not abs(loss - right) <= LOSS_TOLERANCE * abs(right):
            raise AssertionError(f"{contender}: loss {loss} in step {step}, one process has {right}")


def _count_on_rank(
    contenders: Sequence[Contender], layout: Layout, micro_batches: Sequence[int], memory: bool, repetitions: int
) -> list[Counted]:
    prepare_rank()
    return [_count_one(contender, layout, micro_batches, memory, repetitions) for contender in contenders]


def _count_one(
    contender: Contender, layout: Layout, micro_batches: Sequence[int], memory: bool, repetitions: int
) -> Counted:
    gc.collect()
    others = {storage._cdata: storage for storage in map(storage_of, live_tensors())}
    training = contender.build(layout)
    counted = Counted()
    for number in micro_batches:
        for _ in range(WARM_UP):
            counted.losses.append(training.step(len(counted.losses), number))
        counted.steps[number] = []
        for repetition in range(repetitions):
            with ExitStack() as modes:
                peak = modes.enter_context(PeakMemory(_all_but(others))) if memory else None
                # Every step holds the same, and looking after every operation takes time.
                held = modes.enter_context(HeldBlocks(training.held)) if repetition == 0 else None
                counter = modes.enter_context(CollectiveCounter())
                counted.losses.append(training.step(len(counted.losses), number))
            counted.steps[number].append(Step(counter.log, peak.peak if peak else 0))
            if held is not None:
                counted.held[number] = held.most
    return counted


def _all_but(others: Collection[int]) -> list[torch.Tensor]:
    return [tensor for tensor in live_tensors() if storage_of(tensor)._cdata not in others]
