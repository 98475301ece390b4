"""Steps of all contenders, in turns, on the ranks of one spawn."""

import gc
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.virtual.chunk import Setting, check_work, sleep_until
from benchmarks.virtual.pipelines import Contender, Pipeline
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks

MESSAGES = 20
"""How many of them a calibration sends, after a first one."""
HEAD_START = 0.005
"""Seconds for all ranks to learn when they begin."""


class Step(NamedTuple):
    """A step on one rank: when it began and ended (``time.monotonic``, the same clock for all ranks of a machine), its
    loss if this rank knows it, and by chunk of this rank its weight's gradient."""

    start: float
    end: float
    loss: float | None
    gradients: dict[int, float]


class Hop(NamedTuple):
    """Seconds a message took from rank to rank: alone, and until one each way had arrived, both sent at once."""

    one_way: list[float]
    two_way: list[float]


class Measured(NamedTuple):
    """What the ranks of one spawn found."""

    hops: list[Hop]
    """By setting."""
    seconds: list[dict[str, list[float]]]
    """By setting and contender, the duration of every step but the first: from the earliest start of a rank to the
    latest end."""
    precise: bool
    """Whether ranks had real-time priority: then a sleep ends when it should."""


def measure(
    settings: Sequence[Setting],
    contenders: Sequence[Contender],
    repetitions: int,
    enter: Callable[[int], None] | None = None,
) -> Measured:
    """Runs every setting, all with the same number of pipeline ranks, on one set of processes. In every repetition each
    contender that suits the setting makes one step.

    Args:
        enter: called with the rank in its process, ahead of everything else.

    Raises AssertionError if a contender computed something else.
    """
    (ranks,) = {setting.pipeline_ranks for setting in settings}
    found = run_on_ranks(
        ranks, _measure_on_rank, settings, contenders, repetitions, seconds=1800, before_init=Start(enter)
    )
    hops, steps, precise = zip(*found)
    return Measured(hops[0], [check_durations(setting, of) for setting, of in zip(settings, zip(*steps))], all(precise))


class Start(NamedTuple):
    """What a rank does before its process group exists, so that gloo's threads take after it."""

    enter: Callable[[int], None] | None

    def __call__(self, rank: int) -> None:
        if self.enter is not None:
            self.enter(rank)
        try:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        except PermissionError:
            pass


def _measure_on_rank(
    settings: Sequence[Setting], contenders: Sequence[Contender], repetitions: int
) -> tuple[list[Hop], list[dict[str, list[Step]]], bool]:
    prepare_rank()
    hops, steps = [], []
    for setting in settings:
        hops.append(_calibrate(setting.elements))
        pipelines = {entry.name: entry.build(setting) for entry in contenders if entry.suits(setting)}
        # Collections in a step would look through the modules of all frameworks again and again.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        steps.append({name: [] for name in pipelines})
        for _ in range(repetitions + 1):
            for name, pipeline in pipelines.items():
                steps[-1][name].append(time_step(pipeline))
    return hops, steps, is_precise()


def time_step(pipeline: Pipeline) -> Step:
    """One step, begun on all ranks together."""
    begin_together()
    start = time.monotonic()
    loss = pipeline.step()
    end = time.monotonic()
    return Step(start, end, loss, {index: chunk.take_gradient() for index, chunk in pipeline.chunks.items()})


def begin_together() -> None:
    """Returns on all ranks at the same instant; from a barrier alone they return one after the other."""
    dist.barrier()
    instant = torch.tensor(time.monotonic() + HEAD_START, dtype=torch.float64)
    dist.broadcast(instant, 0)
    sleep_until(instant.item())


def _calibrate(elements: int) -> Hop:
    """Messages of so many fp32 numbers between ranks 0 and 1. Rank 0's samples count: it sends and awaits answers."""
    hop = Hop([], [])
    for _ in range(MESSAGES + 1):
        hop.one_way.append(_exchange(elements, both=False))
        hop.two_way.append(_exchange(elements, both=True))
    return Hop(hop.one_way[1:], hop.two_way[1:])


def _exchange(elements: int, both: bool) -> float:
    """Seconds until a message each way has arrived, sent at once, or half of that, sent one after the other. Receives
    are posted ahead, as in a pipeline. Ranks other than 0 and 1 only take part in the beginning."""
    rank = dist.get_rank()
    message, answer = torch.zeros(elements), torch.empty(elements)
    receive = dist.irecv(answer, 1 - rank) if rank < 2 else None
    begin_together()
    if receive is None:
        return 0.0
    start = time.monotonic()
    replies = rank == 1 and not both
    if replies:
        receive.wait()
    send = dist.isend(message, 1 - rank)
    if not replies:
        receive.wait()
    seconds = time.monotonic() - start
    send.wait()
    return seconds if both else seconds / 2


def check_durations(setting: Setting, on_ranks: Sequence[dict[str, list[Step]]]) -> dict[str, list[float]]:
    """By contender, how long every step but the first took. Raises AssertionError if one computed something else."""
    durations = {}
    for name in on_ranks[0]:
        repetitions = list(zip(*(steps[name] for steps in on_ranks)))
        for ranks in repetitions:
            losses = [step.loss for step in ranks if step.loss is not None]
            assert losses, f"no rank knows the loss of {name}"
            gradients = [item for step in ranks for item in step.gradients.items()]
            expected = setting.chunks * setting.data_ranks
            assert len(gradients) == expected, f"{name} has chunks {sorted(gradients)}, not all of {setting}"
            check_work(name, setting, losses, gradients)
        durations[name] = [
            max(step.end for step in ranks) - min(step.start for step in ranks) for ranks in repetitions[1:]
        ]
    return durations


def is_precise() -> bool:
    """Whether this process has real-time priority."""
    return os.sched_getscheduler(0) == os.SCHED_RR


def scheduling(precise: bool) -> str:
    """What a record says of it."""
    return "real-time (SCHED_RR)" if precise else "time-sharing"
