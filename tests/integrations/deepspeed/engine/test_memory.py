"""On real ranks, memory and traffic of the engine match the formulas."""

from functools import cache, partial
from itertools import product

import pytest

from benchmarks.communication import moved
from benchmarks.communication import predicted as predicted_traffic
from benchmarks.contenders import Contender, Layout
from benchmarks.contenders.lgamp import Layered
from benchmarks.counting import count
from benchmarks.memory import LARGEST_DEVIATION, activation_bytes, predicted, typical_peak
from benchmarks.model import ModelSize
from tests.pairwise import pairwise
from tests.slow import slow_except

CHUNKS_PER_RANK = 4
MICRO_BATCHES = 3
SCALAR_BYTES = 500
"""Losses, step counters and the norm."""
GRIDS = [(1, 1), (1, 2), (2, 1), (2, 2)]
FACTORS = {
    "grid": GRIDS,
    "zero_stage": [0, 1, 2, 3],
    "resident_chunks": [1, 2, 3, CHUNKS_PER_RANK],
    "micro_batch_group": [1, 2, MICRO_BATCHES],
    "recompute": ["full", "none"],
    "defer_gathers": [False, True],
}


@cache
def chosen_cases() -> list[dict]:
    """Returns cases with every pair of values of two factors. At stage 3, gathers depend on resident chunks and groups,
    so it has all their combinations."""
    cases = pairwise([dict(zip(FACTORS, values)) for values in product(*FACTORS.values())])
    for number, (resident, group) in enumerate(product(FACTORS["resident_chunks"], FACTORS["micro_batch_group"])):
        named = {"zero_stage": 3, "resident_chunks": resident, "micro_batch_group": group}
        if not any(named.items() <= case.items() and case["grid"][1] == 2 for case in cases):
            rest = {"recompute": FACTORS["recompute"][number % 2], "defer_gathers": False}
            cases.append({"grid": (1, 2), **named, **rest})
    return cases


@pytest.mark.parametrize("grid", slow_except([], GRIDS, slow=[(2, 2)]), ids=str)
def test_memory_and_traffic_are_what_the_formulas_say(grid):
    pipeline_ranks, data_ranks = grid
    layout = Layout(pipeline_ranks, data_ranks, ModelSize(CHUNKS_PER_RANK * pipeline_ranks, 64, 64, 1))
    cases = [case for case in chosen_cases() if case["grid"] == grid]
    options = [{name: value for name, value in case.items() if name != "grid"} for case in cases]
    contenders = [Contender(str(case), partial(Layered, **case)) for case in options]
    counted = count(contenders, layout, (MICRO_BATCHES,), memory=True, repetitions=3)
    for case in options:
        for rank, on_rank in enumerate(counted[str(case)]):
            compare(layout, rank, on_rank, **case)


def compare(layout, rank, counted, zero_stage, resident_chunks, micro_batch_group, recompute, defer_gathers):
    """Compares both gather policies with the formulas. Deferred gathers and gathers behind the step need the same
    memory and are equally many."""
    label = (layout, rank, zero_stage, resident_chunks, micro_batch_group, recompute, defer_gathers)
    place = layout, rank, MICRO_BATCHES, zero_stage, resident_chunks
    told = predicted(*place, recompute == "full", micro_batch_group)
    typical = typical_peak(counted, MICRO_BATCHES)
    assert abs(typical - told.peak) <= LARGEST_DEVIATION * told.peak, (label, typical, told)
    # Takes the smallest of all steps, because gloo's threads may free a tensor late.
    least = min(step.peak_bytes for step in counted.steps[MICRO_BATCHES])
    assert 0 <= least - told.peak <= SCALAR_BYTES, (label, least, told)
    right = predicted_traffic(*place, micro_batch_group)
    if layout.data_ranks == 1:
        right = right._replace(gathers=0, reductions=0)
    assert {moved(step) for step in counted.steps[MICRO_BATCHES]} == {right}, label
    if layout.data_ranks > 1:
        assert (right.gathers, right.reductions) == method_says(zero_stage, resident_chunks, micro_batch_group), label
    if recompute == "full":
        results = [chunk.result for chunk in activation_bytes(layout.size).chunks]
        own = range(rank // layout.data_ranks, layout.size.blocks, layout.pipeline_ranks)
        stored = sum(
            results[chunk - 1] * stored_micro_batches(layout, chunk, micro_batch_group) for chunk in own if chunk
        )
        assert told.activations.inputs == stored, label


def stored_micro_batches(layout, chunk, micro_batch_group):
    """Returns how many inputs a chunk stores.

    The last chunk stores none, because it is not recomputed. At the turn a chunk stores two for every chunk that
    follows, and one more.
    """
    following = layout.size.blocks - 1 - chunk
    if following < layout.pipeline_ranks:
        return min(micro_batch_group, 2 * following + 1) if following else 0
    return micro_batch_group


def method_says(zero_stage, resident_chunks, micro_batch_group):
    """Returns gathers and reductions of a rank with N chunks, B of them resident, and K micro-batch groups.

    Stage 3 gathers K(2N - 2B) + B times, or N times if all chunks are resident. Stages 2 and 3 reduce K*N times, other
    stages N times.
    """
    chunks, groups = CHUNKS_PER_RANK, -(-MICRO_BATCHES // micro_batch_group)
    gathers = chunks if zero_stage else 0
    if zero_stage == 3 and resident_chunks < chunks:
        gathers = groups * (2 * chunks - 2 * resident_chunks) + resident_chunks
    return gathers, chunks * (groups if zero_stage >= 2 else 1)
