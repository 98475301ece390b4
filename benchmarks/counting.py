"""Trains contenders on real ranks and counts, at dispatch, what one step sends and holds."""

import gc
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.contenders import Contender, Layout
from benchmarks.model import Reference, reference_losses
from benchmarks.record import REPETITIONS
from ds_lgamp.runtime.measure import CollectiveCounter, PeakMemory, live_tensors, storage_of
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks

ENGINES_PER_SPAWN = 10
"""Every engine has its own process groups. gloo stalls if one process has very many."""
SPAWN_SECONDS = 1200
WARM_UP = 2
"""Steps before the counted ones, for each number of micro-batches. DeepSpeed's ZeRO-3 still learns the order of the
layers in its second micro-batch."""
LOSS_TOLERANCE = 1e-5
"""Relative. Summation order makes a smaller difference in fp32."""


class HeldBlocks(TorchDispatchMode):
    """Counts the blocks with full parameters after every operation and keeps the maximum."""

    def __init__(self, held: Callable[[], int]) -> None:
        super().__init__()
        self.most, self._held = 0, held

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.most = max(self.most, self._held())
        return result


@dataclass
class Step:
    """Calls and memory of one step on one rank."""

    log: list[tuple[str, int]]
    """Kind, as :class:`CollectiveCounter` names it, and bytes sent, for every call."""
    peak_bytes: int
    in_groups: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """The calls in groups of ranks that the training names in ``groups``, by name."""


@dataclass
class Counted:
    """The counted steps of a contender."""

    losses: list[float | None] = field(default_factory=list)
    """Losses of all steps."""
    steps: dict[int, list[Step]] = field(default_factory=dict)
    """Steps by micro-batches per step."""
    held: dict[int, int] = field(default_factory=dict)
    """The largest number of blocks with full parameters at one time, by micro-batches per step."""


def count(
    contenders: Sequence[Contender],
    layout: Layout,
    micro_batches: Sequence[int],
    memory: bool = False,
    repetitions: int = REPETITIONS,
    reference: Reference = reference_losses,
) -> dict[str, list[Counted]]:
    """Counts every contender. ``WARM_UP`` steps precede the counted ones.

    Args:
        contenders: the trainings to count.
        layout: ranks and model.
        micro_batches: numbers of micro-batches per step.
        memory: whether to count bytes of live tensors too, which is slow.
        repetitions: counted steps for each number of micro-batches.
        reference: trains the same in one process.

    Returns every rank's counts, by contender. Raises AssertionError if the losses of a contender differ from those of
    one process.
    """
    ranks = layout.pipeline_ranks * layout.data_ranks
    sequence = tuple(number for number in micro_batches for _ in range(WARM_UP + repetitions))
    expected = reference(layout.size, layout.data_ranks, sequence)
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
    """Raises AssertionError if a loss differs from the expected one, so that the contender did not train the same."""
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
    groups = training.groups() if hasattr(training, "groups") else {}
    counted = Counted()
    for number in micro_batches:
        for _ in range(WARM_UP):
            counted.losses.append(training.step(len(counted.losses), number))
        counted.steps[number] = []
        for repetition in range(repetitions):
            with ExitStack() as modes:
                peak = modes.enter_context(PeakMemory(_all_but(others))) if memory else None
                # Measured once, because every step holds the same and checking after every operation is slow.
                held = modes.enter_context(HeldBlocks(training.held)) if repetition == 0 else None
                counter = modes.enter_context(CollectiveCounter())
                counted.losses.append(training.step(len(counted.losses), number))
            in_groups = {name: counter.calls_in(group) for name, group in groups.items()}
            counted.steps[number].append(Step(counter.log, peak.peak if peak else 0, in_groups))
            if held is not None:
                counted.held[number] = held.most
    return counted


def _all_but(others: Collection[int]) -> list[torch.Tensor]:
    return [tensor for tensor in live_tensors() if storage_of(tensor)._cdata not in others]
