"""Times whole training steps of small GPTs on loopback: ``python -m benchmarks run training``.

All contenders train the same model on real ranks and take turns in every round. The record has the seconds of a step
and the CPU seconds of all ranks together. If there are more ranks than cores, the CPU seconds show a contender's cost.
The wider model runs only with ds_lgamp, the bare loop, and the peers that came close to the fastest at the small model.
"""

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch.distributed as dist

from benchmarks.contenders import Contender, Layout
from benchmarks.contenders.field import BARE, in_training
from benchmarks.counting import check_losses
from benchmarks.model import ModelSize, Reference, reference_losses
from benchmarks.record import OURS, REPETITIONS, Config, Record, begin
from benchmarks.virtual.steps import begin_together
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks

NAME = "training"
SMALL = ModelSize(blocks=8, width=256, sequence=128, vocabulary=1024)
WIDE = SMALL._replace(width=4 * SMALL.width)
LAYOUTS = ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1))
"""Pipeline ranks and data-parallel ranks."""
MICRO_BATCHES = 8
LOOPBACK = "loopback"
RECOMPUTE = {True: "full", False: "none"}
SMALL_REPETITIONS = 11
"""A step takes a second, and its times scatter by more than the targets allow."""
WARM_UP = 1
CHECKED = 2
"""Steps whose loss is compared with one process. Losses of later steps are compared with each other."""
LIMIT, BARE_LIMIT = 1.0, 1.02
"""Limits of our fastest step, relative to the fastest peer and to the bare loop."""
RATIO = "step / fastest peer's"
CLOSE = 1.05
"""Largest step of a peer at the small model, relative to the fastest peer, at which it also runs at the wider one."""
SECONDS = 3600
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt."""


class Step(NamedTuple):
    """A step on one rank: start and end (``time.monotonic``), CPU seconds of the process, the loss if this rank knows
    it, and the bytes that its meter counted."""

    start: float
    end: float
    cpu: float
    loss: float | None
    metered: int = 0


class Duration(NamedTuple):
    """A step on all ranks: seconds from the first start to the last end, CPU seconds together, and metered bytes."""

    wall: float
    cpu: float
    metered: int = 0


Found = dict[str, dict[str, list[Duration]]]
"""Every counted step, by whether parameters are kept or sharded and by contender."""


def run(
    small: ModelSize = SMALL,
    wide: ModelSize = WIDE,
    layouts: Sequence[tuple[int, int]] = LAYOUTS,
    micro_batches: int = MICRO_BATCHES,
    repetitions: int = REPETITIONS,
    small_repetitions: int = SMALL_REPETITIONS,
) -> Record:
    """Measures every layout, with and without recomputation.

    Args:
        small: the small model.
        wide: the wider model.
        layouts: pipeline ranks and data-parallel ranks.
        micro_batches: micro-batches per step.
        repetitions: repetitions for the wider model.
        small_repetitions: repetitions for the small model.
    """
    record = begin(NAME)
    for pipeline_ranks, data_ranks in layouts:
        layout = Layout(pipeline_ranks, data_ranks, small)
        found = {
            again: compete(in_training(layout, again), layout, micro_batches, small_repetitions) for again in RECOMPUTE
        }
        for again, groups in found.items():
            enter(record, layout, micro_batches, again, LOOPBACK, groups)
        aim(record, layout, LOOPBACK, list(found.values()))
        layout = layout._replace(size=wide)
        closest = {
            held: [one for one in contenders if one.name in _closest(found[True][held])]
            for held, contenders in in_training(layout, recompute=True).items()
        }
        groups = compete(closest, layout, micro_batches, repetitions)
        enter(record, layout, micro_batches, True, LOOPBACK, groups)
        aim(record, layout, LOOPBACK, [groups])
    return record


def compete(
    groups: dict[str, list[Contender]],
    layout: Layout,
    micro_batches: int,
    repetitions: int,
    enter_network: Callable[[int], None] | None = None,
    reference: Reference = reference_losses,
    meter: Callable[[], int] | None = None,
) -> Found:
    """Measures one group after the other. The contenders of a group take turns on one set of processes. ``reference``
    trains the same in one process. Rank 0 reads ``meter``, a number of bytes, before and after every step.

    Raises AssertionError if a contender's losses differ from those of one process.
    """
    ranks = layout.pipeline_ranks * layout.data_ranks
    found = {}
    for held, contenders in groups.items():
        arguments = contenders, layout, micro_batches, repetitions, meter
        on_ranks = run_on_ranks(ranks, _train_on_rank, *arguments, before_init=enter_network, seconds=SECONDS)
        steps = {contender.name: list(zip(*(rank[contender.name] for rank in on_ranks))) for contender in contenders}
        together = {
            contender.name: steps[contender.name]
            for contender in contenders
            if contender.talks and not contender.rounds
        }
        _check(layout, micro_batches, together, reference)
        found[held] = {name: [_duration(ranks) for ranks in each[WARM_UP:]] for name, each in steps.items()}
    return found


def enter(record: Record, layout: Layout, micro_batches: int, recompute: bool, link: str, groups: Found) -> None:
    """Enters the rows of all contenders in one layout."""
    for held, durations in groups.items():
        config: Config = {
            **layout.config(micro_batches),
            "width": layout.size.width,
            "recompute": RECOMPUTE[recompute],
            "link": link,
            "parameters": held,
        }
        for name, each in durations.items():
            record.add(name, config, "step", [duration.wall for duration in each], "s")
            record.add(name, config, "CPU", [duration.cpu for duration in each], "s")


def aim(record: Record, layout: Layout, link: str, runs: Sequence[Found]) -> None:
    """Enters the targets of one layout: the worst of ``runs``, which differ in recomputation."""
    where = f"{layout.pipeline_ranks} x {layout.data_ranks} ranks, width {layout.size.width}, {link}"
    every = [_walls(durations) for groups in runs for durations in groups.values()]
    _aim(record, f"largest {RATIO}, {where}", [(_ours(walls), _fastest_peer(walls)) for walls in every], LIMIT)
    bare = [(_ours(walls), walls[BARE]) for walls in every if BARE in walls]
    if bare:
        _aim(record, f"largest step / bare loop's, {where}", bare, BARE_LIMIT)


def _aim(record: Record, text: str, pairs: Sequence[tuple[list[float], list[float]]], limit: float) -> None:
    """Enters the target of the largest quotient of all ``pairs``."""
    record.compare(text, *max(pairs, key=lambda pair: median(pair[0]) / median(pair[1])), limit)


def _walls(durations: dict[str, list[Duration]]) -> dict[str, list[float]]:
    return {name: [duration.wall for duration in each] for name, each in durations.items()}


def _ours(walls: dict[str, list[float]]) -> list[float]:
    """The faster schedule of ours, because a user would choose it."""
    return min((each for name, each in walls.items() if name.startswith(OURS)), key=median)


def _fastest_peer(walls: dict[str, list[float]]) -> list[float]:
    return min((each for name, each in walls.items() if not name.startswith(OURS)), key=median)


def _closest(durations: dict[str, list[Duration]]) -> set[str]:
    """Names of ours, the bare loop, and the peers that came close to the fastest."""
    walls = _walls(durations)
    limit = CLOSE * median(_fastest_peer(walls))
    return {name for name, each in walls.items() if name.startswith(OURS) or name == BARE or median(each) <= limit}


def _train_on_rank(
    contenders: Sequence[Contender],
    layout: Layout,
    micro_batches: int,
    repetitions: int,
    meter: Callable[[], int] | None,
) -> dict[str, list[Step]]:
    prepare_rank()
    keep_memory()
    trainings = {contender.name: contender.build(layout) for contender in contenders}
    gc.collect()
    gc.freeze()
    steps: dict[str, list[Step]] = {name: [] for name in trainings}
    for step in range(WARM_UP + repetitions):
        for name, training in trainings.items():
            before = _read(meter)
            begin_together()
            start, cpu = time.monotonic(), time.process_time()
            loss = training.step(step, micro_batches)
            end, cpu = time.monotonic(), time.process_time() - cpu
            begin_together()
            steps[name].append(Step(start, end, cpu, loss, _read(meter) - before))
    return steps


def _read(meter: Callable[[], int] | None) -> int:
    return meter() if meter is not None and dist.get_rank() == 0 else 0


def keep_memory() -> None:
    """Makes this process keep freed memory, as torch's allocators on GPUs do.

    glibc returns large tensors to the system by default. A contender with large tensors would then spend part of every
    step on page faults.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        adjust(_MMAP_MAX, 0)
        adjust(_TRIM_THRESHOLD, (1 << 31) - 1)


def _duration(ranks: Sequence[Step]) -> Duration:
    wall = max(step.end for step in ranks) - min(step.start for step in ranks)
    return Duration(wall, sum(step.cpu for step in ranks), sum(step.metered for step in ranks))


def _check(layout: Layout, micro_batches: int, steps: dict[str, list[tuple[Step, ...]]], reference: Reference) -> None:
    losses = {}
    for name, each in steps.items():
        known = [{step.loss for step in ranks} - {None} for ranks in each]
        assert all(len(found) == 1 for found in known), f"ranks of {name} know no loss or different ones"
        losses[name] = [found.pop() for found in known]
    first, *_ = losses.values()
    alone = reference(layout.size, layout.data_ranks, (micro_batches,) * min(CHECKED, len(first)))
    for name, found in losses.items():
        check_losses(name, found, [*alone, *first[len(alone) :]])
