"""Collectives begin and are awaited where the program says, and nowhere else."""

from itertools import product

import pytest

from ds_lgamp.partition.flat_storage import FlatStorage
from ds_lgamp.partition.shards import GradientReduction
from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.spec import ProgramSpec
from testing.ranks import run_on_ranks
from tests.cost.test_traffic import train
from tests.runtime.assembly import build_grid


def specs(pipeline_ranks):
    """Yields stages x resident chunks with one and with several micro-batch groups, deferred gathers, and other orders
    at stages 2 and 3."""
    placement = place_chunks("modular", 3 * pipeline_ranks, pipeline_ranks)
    for stage, resident in [(0, 2), (1, 2), *product((2, 3), (1, 2, 3))]:
        for group in (4, 2):
            yield ProgramSpec(placement, "layered", 4, group, stage, resident)
    for stage in (1, 2):
        yield ProgramSpec(placement, "layered", 4, 4, stage, defers_gathers=True)
    for stage in (2, 3):
        yield ProgramSpec(place_chunks("modular", 2 * pipeline_ranks, pipeline_ranks), "interleaved_1f1b", 4, 4, stage)
        yield ProgramSpec(place_chunks("modular", pipeline_ranks, pipeline_ranks), "1f1b", 4, 4, stage)


AWAITED = {Kind.WAIT_GATHER: "awaits a gather", Kind.WAIT_REDUCE: "awaits a reduction"}


def trace_waits(trace):
    """Makes units add an event to ``trace`` whenever they await a collective that is under way."""

    def tracing(owner, method, under_way, event):
        stock = getattr(owner, method)

        def await_collective(self):
            if getattr(self, under_way) is not None:
                trace.append(event)
            stock(self)

        setattr(owner, method, await_collective)

    tracing(FlatStorage, "finish_gather", "gathering", AWAITED[Kind.WAIT_GATHER])
    tracing(GradientReduction, "finish_reduction", "_reducing", AWAITED[Kind.WAIT_REDUCE])


def compare_traces(pipeline_ranks, data_ranks):
    grid = build_grid(pipeline_ranks, data_ranks)
    compared, trace = 0, []
    trace_waits(trace)
    for spec in specs(pipeline_ranks):
        counter, _, actions, _ = train(grid, spec, tied=False, log=trace)
        awaited = [AWAITED.get(action.kind) for action in actions]
        assert trace == [event for pair in zip(map(str, actions), awaited) for event in pair if event], spec
        kinds = {Kind.GATHER: "all_gather", Kind.REDUCE: "all_to_all" if spec.zero_stage else "all_reduce"}
        launched = [kind for kind, _ in counter.log if kind not in ("send", "receive")]
        assert launched == [kinds[action.kind] for action in actions if action.kind in kinds], spec
        compared += 1
    return compared


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline_ranks", "data_ranks"), [(1, 2), (1, 4), (2, 2)])
def test_collectives_begin_and_are_awaited_where_the_program_says(pipeline_ranks, data_ranks):
    counts = run_on_ranks(pipeline_ranks * data_ranks, compare_traces, pipeline_ranks, data_ranks)
    assert counts == [8 * 2 + 2 + 4] * pipeline_ranks * data_ranks
