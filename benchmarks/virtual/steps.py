"""Times steps of all contenders, which take turns on one set of processes."""

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.virtual.chunk import Setting, check_work, sleep_until
from benchmarks.virtual.pipelines import Contender, Executed, Pipeline
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks

MESSAGES = 20
"""Messages that a calibration sends, after a first one."""
HEAD_START = 0.005
"""Seconds for all ranks to learn when they begin."""


class Step(NamedTuple):
    """A step on one rank: start and end, the loss if this rank knows it, and the gradients of this rank's weights by
    chunk.

    Times are from ``time.monotonic``, which is the same clock for all ranks of a machine.
    """

    start: float
    end: float
    loss: float | None
    gradients: dict[int, float]


class Hop(NamedTuple):
    """Seconds of a message between two ranks: alone, and until both messages have arrived if one goes each way at
    once."""

    one_way: list[float]
    two_way: list[float]


class Measured(NamedTuple):
    """Results of all ranks of one set of processes."""

    hops: list[Hop]
    """By setting."""
    seconds: list[dict[str, list[float]]]
    """By setting and contender, seconds of every step but the first: from the earliest start of a rank to the latest
    end."""
    precise: bool
    """Whether the ranks had real-time priority. A sleep then ends on time."""


def measure(
    settings: Sequence[Setting],
    contenders: Sequence[Contender],
    repetitions: int,
    enter: Callable[[int], None] | None = None,
) -> Measured:
    """Runs all settings on one set of processes. Each contender that suits a setting makes one step per repetition.

    Args:
        settings: pipelines with the same number of pipeline ranks.
        contenders: the contenders to run.
        repetitions: number of counted steps.
        enter: called first in every process, with its rank.

    Raises AssertionError if a contender has a wrong loss or gradient.
    """
    (ranks,) = {setting.pipeline_ranks for setting in settings}
    found = run_on_ranks(
        ranks, _measure_on_rank, settings, contenders, repetitions, seconds=1800, before_init=Start(enter)
    )
    hops, steps, precise = zip(*found)
    return Measured(hops[0], [check_durations(setting, of) for setting, of in zip(settings, zip(*steps))], all(precise))


class Start(NamedTuple):
    """Prepares a rank before its process group exists, so that gloo's threads inherit namespace and priority."""

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
        hops.append(calibrate_hop(setting.elements))
        pipelines = {entry.name: entry.build(entry.own(setting)) for entry in contenders if entry.suits(setting)}
        # A garbage collection during a step would traverse the modules of all frameworks.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        steps.append({name: [] for name in pipelines})
        for _ in range(repetitions + 1):
            for name, pipeline in pipelines.items():
                steps[-1][name].append(time_step(pipeline))
    return hops, steps, is_precise()


def time_step(pipeline: Pipeline) -> Step:
    """Times one step, started on all ranks together."""
    begin_together()
    start = time.monotonic()
    loss = pipeline.step()
    end = time.monotonic()
    return Step(start, end, loss, {index: chunk.take_gradient() for index, chunk in pipeline.chunks.items()})


def seconds_in_turns(pipelines: Mapping[Any, Executed], turns: int, steps: int) -> dict[Any, list[float]]:
    """Returns the seconds per step of every turn but the first, by the keys of ``pipelines``, which take turns. A turn
    makes several steps without a pause. Its time counts from the end of the first one."""
    gc.collect()
    gc.freeze()
    seconds: dict[Any, list[float]] = {key: [] for key in pipelines}
    for _ in range(1 + turns):
        for key, pipeline in pipelines.items():
            begin_together()
            for step in range(steps):
                pipeline.step()
                if step == 0:
                    start = time.monotonic()
            seconds[key].append((time.monotonic() - start) / (steps - 1))
            # No update of this turn runs in the next one.
            pipeline.partition.catch_up()
    return {key: each[1:] for key, each in seconds.items()}


def begin_together() -> None:
    """Returns on all ranks at the same instant. A barrier alone releases them one after the other."""
    dist.barrier()
    instant = torch.tensor(time.monotonic() + HEAD_START, dtype=torch.float64)
    dist.broadcast(instant, 0)
    sleep_until(instant.item())


def calibrate_hop(elements: int) -> Hop:
    """Times messages of ``elements`` fp32 numbers between ranks 0 and 1. Only rank 0's samples count, because it sends
    first and waits for answers."""
    hop = Hop([], [])
    for _ in range(MESSAGES + 1):
        hop.one_way.append(_exchange(elements, both=False))
        hop.two_way.append(_exchange(elements, both=True))
    return Hop(hop.one_way[1:], hop.two_way[1:])


def _exchange(elements: int, both: bool) -> float:
    """Exchanges one message each way between ranks 0 and 1. Returns the seconds until both have arrived if ``both`` are
    sent at once, else half of the seconds of a round trip.

    Receives are posted first, as in a pipeline. Other ranks only take part in the common start.
    """
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
    """Returns the seconds of every step but the first, by contender. Raises AssertionError if a loss or gradient is
    wrong."""
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
    """The record's word for the scheduling policy."""
    return "real-time (SCHED_RR)" if precise else "time-sharing"
