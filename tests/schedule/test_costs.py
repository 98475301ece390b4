"""Costs that differ between chunks, links and ranks."""

from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.costs import Costs, Durations, links_of, uniform_costs
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_program, build_timed_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import ProgramSpec
from tests.schedule.strategies import program_specs

TIMES = st.integers(0, 9)
"""Whole numbers, so that sums are exact."""


@st.composite
def uneven_costs(draw, spec: ProgramSpec) -> Costs:
    def each(count: int) -> list[int]:
        return draw(st.lists(TIMES, min_size=count, max_size=count))

    links = sorted(links_of(spec))
    return Costs(
        *(each(spec.chunks) for _ in range(5)),
        hop=dict(zip(links, each(len(links)))),
        message=dict(zip(links, each(len(links)))),
        update=each(spec.chunks),
        tied=each(spec.pipeline_ranks),
        shares_card=draw(st.booleans()),
        refresh=each(spec.chunks) if spec.hierarchy else (),
        combine=each(spec.chunks) if spec.hierarchy else (),
        load=each(spec.chunks) if spec.offload else (),
        store=each(spec.chunks) if spec.offload else (),
    )


def case(schedule, ranks, chunks_per_rank, micro_batches, stage=0, **durations):
    placement = place_chunks("modular", ranks * chunks_per_rank, ranks)
    spec = ProgramSpec(placement, schedule, micro_batches, micro_batches, stage)
    return spec, build_program(spec), uniform_costs(spec, Durations(**durations))


@given(program_specs().flatmap(lambda spec: st.tuples(st.just(spec), uneven_costs(spec))))
def test_every_action_takes_what_its_chunk_costs(case):
    spec, costs = case
    timeline = simulate(spec, build_program(spec), replace(costs, shares_card=False))
    first, second = costs.parts_of_backward(spec)
    of_kind = {Kind.FORWARD: costs.forward, Kind.BACKWARD: first, Kind.WEIGHTS_BACKWARD: second}
    of_kind[Kind.GATHER] = costs.gather
    of_kind |= {Kind.REDUCE: costs.reduce, Kind.REFRESH: costs.refresh, Kind.COMBINE: costs.combine}
    of_kind |= {Kind.LOAD: costs.load, Kind.STORE: costs.store, Kind.UPDATE: costs.update}
    for start, end, action in chain(*timeline.spans, *timeline.collectives):
        again = action.kind is Kind.BACKWARD and spec.marked(action).recomputed
        more = costs.recompute[action.chunk] if again else 0
        assert end - start == of_kind[action.kind][action.chunk] + more
    work = sum(end - start for start, end, _ in chain(*timeline.spans))
    assert timeline.ideal == pytest.approx(work / spec.pipeline_ranks)


@given(program_specs().flatmap(lambda spec: st.tuples(st.just(spec), uneven_costs(spec))))
def test_a_program_without_sends_and_receives_has_the_same_timeline(case):
    spec, costs = case
    assert simulate(spec, build_timed_program(spec), costs, sends_at_once=True) == simulate(
        spec, build_program(spec), costs
    )


def test_the_slow_direction_of_a_slow_link_delays_what_takes_it():
    """Activations go from rank 0 to rank 1, their gradients back, and the second visit of rank 0 takes the wrap-around
    link."""
    spec, program, costs = case("layered", 2, 2, 2, forward=10, backward=20)
    plain = simulate(spec, program, costs).step_time
    uphill, downhill = (
        simulate(spec, program, replace(costs, hop={**costs.hop, link: 7})).step_time for link in ((0, 1), (1, 0))
    )
    # Forwards cross (0, 1) at two chunk boundaries and (1, 0) at one, backwards the other way round. M = P, so every
    # hop delays the step.
    assert (uphill, downhill) == (plain + 2 * 7 + 7, plain + 7 + 2 * 7)
    spec, program, costs = case("gpipe", 2, 1, 1, forward=10, backward=20)
    assert simulate(spec, program, replace(costs, hop={(0, 1): 7, (1, 0): 5})).step_time == 2 * 30 + 7 + 5


def test_messages_of_a_rank_leave_one_after_another_whichever_links_they_take():
    """Rank 1 of three sends an activation to rank 2 after its forward and a gradient to rank 0 after its backward."""
    spec, program, costs = case("gpipe", 3, 1, 1, forward=1, backward=2)
    busy = {**costs.message, (1, 2): 30}
    timeline = simulate(spec, program, replace(costs, message=busy))
    # F0 F1 F2 B2 end at 7, B1 at 9. Its gradient leaves when the activation has, 30 after 2.
    assert timeline.spans[0][-1].start == 32


def test_the_update_follows_the_last_backward_of_each_rank():
    spec, program, costs = case("gpipe", 2, 1, 1, forward=1, backward=2)
    timeline = simulate(spec, program, replace(costs, update=[5, 9]))
    assert [[span[:2] for span in spans] for spans in timeline.updates] == [[(6, 11)], [(4, 13)]]
    assert timeline.step_time == 13
    assert simulate(spec, program, costs).updates == [[], []]


def test_ranks_with_copies_of_tied_modules_sum_them_together():
    """Rank 0 is the last to end its backwards, at 9. Rank 1 has no copy and does not wait."""
    spec, program, costs = case("gpipe", 3, 1, 1, forward=1, backward=2)
    timeline = simulate(spec, program, replace(costs, tied=[4, 0, 4], update=[1, 1, 1]))
    assert [[span[:2] for span in spans] for spans in timeline.updates] == [[(9, 14)], [(7, 8)], [(9, 14)]]


def test_evaluation_has_no_update():
    spec, _, costs = case("gpipe", 2, 1, 1, forward=1, update=5)
    spec = spec.evaluation()
    assert simulate(spec, build_program(spec), costs).step_time == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward": [1]}, "forward has 1 costs; give one for each chunk, 4 in all"),
        ({"update": [1] * 3}, "update has 3 costs; give one for each chunk, 4 in all"),
        ({"tied": [1] * 3}, "tied has 3 costs; give one for each pipeline rank, 2 in all"),
        ({"refresh": [1] * 4}, "refresh has 4 costs; give one for each chunk, 0 in all"),
        ({"reduce": [1, 1, 1, -1]}, "reduce is -1; a cost is finite and not negative"),
        ({"hop": {(0, 1): 1}}, "hop has no cost of the link from rank 1 to rank 0; add it"),
        ({"message": {(0, 1): 1, (1, 0): float("nan")}}, "message is nan; a cost is finite and not negative"),
    ],
)
def test_costs_that_do_not_fit_the_program_are_refused(change, message):
    spec, program, costs = case("layered", 2, 2, 2)
    with pytest.raises(ValueError, match=message):
        simulate(spec, program, replace(costs, **change))
