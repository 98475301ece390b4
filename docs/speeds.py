"""The generated block of docs/networks.md about work by speed: step times on the clock."""

from collections.abc import Sequence
from itertools import pairwise

from ds_lgamp.schedule.costs import UNIT_DURATIONS, sized_costs
from ds_lgamp.schedule.placement import Placement, place_chunks, shares_by_speed, split_by_speed, split_evenly
from ds_lgamp.schedule.program import build_timed_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import ProgramSpec
from testing.markdown import table

LAYERS, MICRO_BATCHES = 24, 8
SPEEDS = ([2, 1], [3, 1], [3, 2], [2, 1, 1], [2, 2, 1], [3, 3, 1, 1])


def by_speed() -> str:
    """Step times in units of the ideal: all ranks always busy. Communication takes no time."""
    rows = []
    for speeds in SPEEDS:
        ranks, rounds = len(speeds), min(shares_by_speed(LAYERS, speeds))
        modular = place_chunks("modular", ranks * rounds, ranks)
        sizes = split_by_speed(LAYERS, modular, speeds)
        finest = place_chunks("modular", LAYERS // ranks * ranks, ranks)
        each = list(range(LAYERS + 1))
        cuts = [(finest, split_evenly(LAYERS, len(finest))), (_skipping(speeds), each), (modular, sizes)]
        times = [_time(placement, bounds, speeds) for placement, bounds in cuts]
        first = ", ".join(str(sizes[rank + 1] - sizes[rank]) for rank in range(ranks))
        rows.append([" : ".join(map(str, speeds)), *(f"{time:.2f}" for time in times), f"{rounds}", first])
    header = ["speeds", "alike", "more chunks", "larger chunks", "chunks per rank", "layers of the first ones"]
    return table(header, rows, numbers_from=1)


def _time(placement: Placement, bounds: Sequence[int], speeds: Sequence[float]) -> float:
    spec = ProgramSpec(placement, "layered", MICRO_BATCHES, MICRO_BATCHES, zero_stage=0)
    costs = sized_costs(spec, UNIT_DURATIONS, [end - start for start, end in pairwise(bounds)], speeds)
    whole = (UNIT_DURATIONS.forward + UNIT_DURATIONS.backward) * LAYERS * MICRO_BATCHES
    return simulate(spec, build_timed_program(spec), costs, sends_at_once=True).step_time / (whole / sum(speeds))


def _skipping(speeds: Sequence[float]) -> Placement:
    """Chunks of one layer, more of them on fast ranks: slow ranks skip rounds, spread evenly."""
    shares = shares_by_speed(LAYERS, speeds)
    middles = [((2 * k + 1) / (2 * share), rank) for rank, share in enumerate(shares) for k in range(share)]
    return tuple(rank for _, rank in sorted(middles))
