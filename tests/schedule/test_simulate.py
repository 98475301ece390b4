from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.schedule import orders
from ds_lgamp.schedule.actions import (
    BETWEEN_NODES,
    COLLECTIVES,
    COMPUTE,
    WAITS,
    Action,
    Kind,
    awaited_by,
)
from ds_lgamp.schedule.costs import UNIT_DURATIONS, Durations, uniform_costs
from ds_lgamp.schedule.orders import default_placement, micro_batch_groups
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import peak_live_activations, simulate
from ds_lgamp.schedule.spec import ProgramSpec
from tests.schedule.strategies import OFFLOADING, program_specs


def timeline(schedule, ranks, chunks_per_rank, micro_batches, durations=UNIT_DURATIONS, stage=0):
    placement = place_chunks("modular", ranks * chunks_per_rank, ranks)
    spec = ProgramSpec(placement, schedule, micro_batches, micro_batches, stage)
    return simulate(spec, build_program(spec), durations)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 12))
def test_a_layered_step_takes_as_long_as_the_formula_says(ranks, chunks_per_rank, micro_batches):
    """t [(N - 1) max(M, P) + M + P - 1] with t = forward + backward, also for M below P."""
    larger = max(micro_batches, ranks)
    expected = 3 * ((chunks_per_rank - 1) * larger + micro_batches + ranks - 1)
    assert timeline("layered", ranks, chunks_per_rank, micro_batches).step_time == expected


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_one_chunk_per_rank_leaves_the_bubble_of_the_formula(schedule):
    assert timeline(schedule, 4, 1, 8).bubble == pytest.approx(3 / 8)


@pytest.mark.parametrize("schedule", ["layered", "interleaved_1f1b"])
def test_bubble_shrinks_by_the_chunks_per_rank(schedule):
    assert timeline(schedule, 4, 4, 8).bubble == pytest.approx(3 / (4 * 8))


@pytest.mark.parametrize("micro_batches", [4, 8, 12, 16])
def test_with_second_parts_zbv_waits_only_until_the_last_rank_begins(micro_batches):
    """A forward and both parts of a backward take one unit per chunk: P - 1 units until the last rank begins. Of the
    others, 1f1b's chunks are twice as long; interleaved_1f1b and layered come as near only with more stored inputs."""
    ranks, stored, waits = 4, {}, {}
    for schedule, chunks in (("1f1b", 1), ("interleaved_1f1b", 2), ("layered", 2), ("zbv", 2)):
        placement = place_chunks(default_placement(schedule), chunks * ranks, ranks)
        spec = ProgramSpec(placement, schedule, micro_batches, micro_batches, 0, recomputes=False, split_backward=8)
        program = build_program(spec)
        clock = simulate(spec, program, Durations(2 / chunks, 4 / chunks))
        waits[schedule] = clock.step_time - clock.ideal
        stored[schedule] = max(map(peak_live_activations, program)) / chunks
    more = micro_batches > ranks
    assert waits == {"1f1b": 6, "interleaved_1f1b": 3 if more else 6, "layered": 3, "zbv": 3}
    assert stored == {
        "1f1b": 4,
        "interleaved_1f1b": 5.5 if more else 4,
        "layered": (micro_batches + min(micro_batches, 7)) / 2,
        "zbv": 4,
    }


def test_a_hop_hurts_interleaved_more_than_layered():
    """10 and 20 ms of compute, 1 MiB over 1 Gbit/s."""
    durations = Durations(0.010, 0.020, 2**20 * 8 / 1e9)
    layered = timeline("layered", 4, 4, 8, durations).bubble
    assert layered < 0.5 * timeline("interleaved_1f1b", 4, 4, 8, durations).bubble


def forwards_first(placement, rank, micro_batches, group):
    """Returns the layered order without its turn."""
    chunks = [chunk for chunk, owner in enumerate(placement) if owner == rank]
    for members in micro_batch_groups(micro_batches, group):
        yield from (Action(Kind.FORWARD, chunk, member) for chunk in chunks for member in members)
        yield from (Action(Kind.BACKWARD, chunk, member) for chunk in reversed(chunks) for member in members)


@given(program_specs(), st.integers(1, 9), st.integers(1, 9), st.floats(0, 0.5))
def test_the_turn_costs_no_time_while_a_hop_takes_at_most_half_of_a_forward_and_a_backward(
    spec, forward, backward, share
):
    spec = replace(spec, schedule="layered", forward_only=False)
    durations = Durations(forward, backward, share * (forward + backward))
    with pytest.MonkeyPatch.context() as patch:
        turning = simulate(spec, build_program(spec), durations).step_time
        patch.setitem(orders.ORDERS, "layered", forwards_first)
        assert turning <= simulate(spec, build_program(spec), durations).step_time * (1 + 1e-9)


def taking_turns(compute: float, exchange: float, exchanges: int) -> list[float]:
    """Returns when two forwards end that take turns: one computes until its tokens travel, then the other. Tokens
    travel one after another."""
    now = network = 0.0
    arrived, done, ends, own = [0.0, 0.0], [0, 0], [0.0, 0.0], 0
    while not all(ends):
        now = max(now, arrived[own]) + compute
        done[own] += 1
        if done[own] > exchanges:
            ends[own] = now
        else:
            network = arrived[own] = max(now, network) + exchange
        if not ends[1 - own]:
            own = 1 - own
    return ends


@given(st.floats(0.1, 9), st.floats(0, 9), st.integers(1, 5))
def test_forwards_that_take_turns_hide_each_others_exchanges(compute, exchange, exchanges):
    """Forwards of the first two micro-batches, and the forwards that their backwards repeat."""
    spec = ProgramSpec((0, 0), "layered", 3, 3, 0, overlaps_exchanges=True)
    forward = (exchanges + 1) * compute + exchanges * exchange
    durations = Durations(forward, 1.0, recompute=forward, exchange=exchanges * exchange, exchanges=exchanges)
    spans = simulate(spec, build_program(spec), durations).spans[0]
    ends = taking_turns(compute, exchange, exchanges)
    assert [spans[0].end, spans[1].end] == pytest.approx(ends)
    first, second, _ = [span for span in spans if span.action.kind is Kind.BACKWARD and span.action.chunk == 0]
    assert [first.end - first.start - 1, second.end - first.start - 2] == pytest.approx(ends)
    assert spans[2].end - spans[2].start == pytest.approx(forward)


def test_forwards_of_which_nobody_knows_the_exchanges_hide_none():
    spec = ProgramSpec((0, 1, 0, 1), "layered", 4, 4, 0, overlaps_exchanges=True)
    costs = replace(uniform_costs(spec, UNIT_DURATIONS), exchange=(), exchanges=())
    alone = replace(spec, overlaps_exchanges=False)
    beside, after = (simulate(each, build_program(each), costs).step_time for each in (spec, alone))
    assert beside >= after


def test_an_exchange_longer_than_its_forward_is_refused():
    spec = ProgramSpec((0, 0), "layered", 3, 3, 0)
    with pytest.raises(ValueError, match=r"exchange is 2.0; it is a part of the forward, which takes 1.0"):
        simulate(spec, build_program(spec), uniform_costs(spec, Durations(exchange=2.0)))


@given(program_specs(), st.integers(1, 9))
def test_recomputation_costs_time_on_every_chunk_but_one_that_turns_at_once(spec, recompute):
    spec = replace(spec, forward_only=False, split_backward=0)
    result = simulate(spec, build_program(spec), Durations(3, 5, recompute=recompute))
    for span in [span for spans in result.spans for span in spans if span.action.kind is Kind.BACKWARD]:
        kept = not spec.marked(span.action).recomputed
        assert span.end - span.start == (5 if kept else 5 + recompute)
    compute = sum(span.end - span.start for spans in result.spans for span in spans)
    assert result.ideal == pytest.approx(compute / spec.pipeline_ranks)


def test_a_hop_delays_the_receiver_only():
    assert timeline("gpipe", 2, 1, 3, Durations(1, 2, 5)).step_time == 1 * 3 + 2 * 3 + (1 + 2) + 2 * 5


def test_tensors_follow_one_another_where_one_keeps_the_link_busy():
    """Activations start at 1, 5 and 9 and arrive 5 later. Their gradients follow 4 apart from 17 on."""
    assert timeline("gpipe", 2, 1, 3, Durations(1, 2, 5, message=4)).step_time == (17 + 2 * 4) + 5 + 2


def test_layered_without_a_pipeline_has_no_bubble():
    assert timeline("layered", 1, 6, 4).bubble == 0


@given(program_specs())
def test_no_rank_computes_two_things_at_once(spec):
    result = simulate(spec, build_program(spec))
    for spans in result.spans:
        assert all(before.end <= after.start for before, after in zip(spans, spans[1:]))


def behind_step_first(actions):
    """Returns the order of one step among many. The collectives that the previous step launched behind its STEP run
    first."""
    end = next((row for row, action in enumerate(actions) if action.kind is Kind.STEP), len(actions) - 1) + 1
    return actions[end:] + actions[:end]


@given(program_specs(), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_collectives_of_a_rank_run_one_after_another_and_each_is_awaited_once(spec, gather, reduce, refresh, combine):
    """Those between nodes beside those inside. Offloading adds lanes (test_offload.py)."""
    program = build_program(spec)
    durations = Durations(3, 5, 1, gather, reduce, refresh=refresh, combine=combine)
    result = simulate(spec, program, durations)
    for actions, collectives, waits in zip(program, result.collectives, result.waits):
        launched = [action for action in behind_step_first(actions) if action.kind in COLLECTIVES]
        collectives = [span for span in collectives if span.action.kind in COLLECTIVES]
        waits = [wait for wait in waits if awaited_by(wait.action).kind in COLLECTIVES]
        assert [span.action for span in collectives] == launched
        for network in (BETWEEN_NODES, COLLECTIVES - BETWEEN_NODES):
            spans = [span for span in collectives if span.action.kind in network]
            assert all(before.end <= after.start for before, after in zip(spans, spans[1:]))
        assert Counter(awaited_by(wait.action) for wait in waits) == Counter(launched)
        assert all(before.end <= after.start for before, after in zip(waits, waits[1:]))


@given(program_specs())
def test_collectives_that_take_no_time_change_nothing(spec):
    program = build_program(spec)
    beside = COLLECTIVES | WAITS | (OFFLOADING if spec.offload else set())
    without = [[action for action in actions if action.kind not in beside] for actions in program]
    result, bare = (simulate(spec, actions, Durations(3, 5, 1)) for actions in (program, without))
    assert result.spans == bare.spans and result.step_time == bare.step_time
    assert not any(result.exposed(Kind.GATHER) + result.exposed(Kind.REDUCE))


@given(program_specs(), st.integers(0, 9), st.integers(0, 9))
def test_compute_begins_when_its_chunk_is_gathered(spec, gather, reduce):
    program = build_program(spec)
    result = simulate(spec, program, Durations(3, 5, 1, gather, reduce))
    for actions, spans, collectives in zip(program, result.spans, result.collectives):
        gathered, needed = {}, {action.chunk for action in actions if action.kind is Kind.GATHER}
        assert spec.zero_stage == 0 or needed or (spec.zero_stage < 3 and spec.forward_only)
        for span in sorted([*collectives, *spans], key=lambda span: (span.end, span.start)):
            if span.action.kind is Kind.GATHER:
                gathered[span.action.chunk] = span.end
            elif span.action.kind in COMPUTE and span.action.chunk in needed:
                assert gathered[span.action.chunk] <= span.start


@st.composite
def hidden_collectives(draw):
    """Draws a layered spec and durations that let its collectives hide behind compute.

    A chunk's forwards take as long as a gather, and its backwards as long as a reduction and, at stage 3, a gather.
    With several groups forwards follow backwards, so every visit takes as long as both.
    """
    spec = draw(program_specs().filter(lambda spec: spec.schedule == "layered" and not spec.returns_outputs))
    spec = replace(spec, forward_only=False, split_backward=0)
    # At the turn, a rank's only chunk begins a group's backwards after some of its forwards.
    if min(map(spec.placement.count, range(spec.pipeline_ranks))) == 1:
        spec = replace(spec, micro_batch_group=spec.micro_batches)
    stage = draw(st.integers(1, 3))
    spec = replace(
        spec, zero_stage=stage, resident_chunks=draw(st.integers(2, 5)), updates="step", hierarchy=None, offload=None
    )
    gather, reduce = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    both = gather + reduce
    groups = micro_batch_groups(spec.micro_batches, spec.micro_batch_group)
    behind_forwards = gather if len(groups) == 1 else both
    behind_backwards = both if len(groups) > 1 or spec.zero_stage == 3 else reduce
    fewest = min(map(len, groups))
    # Durations are whole numbers, rounded up, so that sums are exact.
    forward, backward = (
        -(-behind // fewest) + draw(st.integers(0, 3)) for behind in (behind_forwards, behind_backwards)
    )
    return spec, Durations(forward, backward, draw(st.integers(0, 5)), gather, reduce)


@given(hidden_collectives())
def test_layered_exposes_at_most_the_first_gather_and_the_last_reduction(case):
    spec, durations = case
    program = build_program(spec)
    result = simulate(spec, program, durations)
    bound = durations.gather + durations.reduce
    for gathers, reduces in zip(result.exposed(Kind.GATHER), result.exposed(Kind.REDUCE)):
        assert gathers <= durations.gather and reduces <= durations.reduce
    assert result.step_time <= simulate(spec, program, durations._replace(gather=0, reduce=0)).step_time + bound


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_first_gather_and_the_last_reduction_cannot_hide(stage):
    result = timeline("layered", 1, 4, 5, Durations(1, 2, 0, 5, 4), stage)
    assert result.exposed(Kind.GATHER) == [5] and result.exposed(Kind.REDUCE) == [4]
    assert result.step_time == 4 * 5 * 3 + 5 + 4


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.sampled_from([2, 3]))
def test_one_resident_chunk_exposes_every_gather_and_reduction_that_no_visit_hides(chunks, group, groups, stage):
    """N chunks and K groups. Stage 3 exposes each of the K (2N - 2) + 1 gathers, stage 2 only the first. The reductions
    of chunk 0 hide behind the forwards of the next group, so K (N - 1) + 1 of K N reductions are exposed."""
    gather, reduce = 3, 4
    spec = ProgramSpec((0,) * chunks, "layered", group * groups, group, stage, resident_chunks=1)
    durations = Durations(7, 14, 0, gather, reduce)
    result = simulate(spec, build_program(spec), durations)
    gathers = groups * (2 * chunks - 2) + 1 if stage == 3 else 1
    exposed = gathers * gather + (groups * (chunks - 1) + 1) * reduce
    assert sum(result.exposed(Kind.GATHER) + result.exposed(Kind.REDUCE)) == exposed
    assert result.step_time == chunks * group * groups * 21 + exposed


def test_a_backward_waits_for_the_oldest_reduction_when_as_many_gradients_are_held_as_chunks_may_be_resident():
    """There are two buffers. The backward of chunk 1 needs that of chunk 3, whose reduction outlasts the backward of
    chunk 2."""
    spec = ProgramSpec((0,) * 4, "layered", 1, 1, 2, resident_chunks=2)
    (waits,) = simulate(spec, build_program(spec), Durations(1, 2, 0, 0, 5)).waits
    assert [(str(wait.action), wait.end - wait.start) for wait in waits[4:]] == [
        ("WAIT_REDUCE3", 3),
        ("WAIT_REDUCE2", 3),
        ("WAIT_REDUCE1", 3),
        ("WAIT_REDUCE0", 5),
    ]


@pytest.mark.parametrize("stage", [1, 2])
def test_gathers_behind_the_step_run_when_the_next_one_begins(stage):
    """Gathers run one after another. Chunk 2 waits for the rest of three gathers after two forwards."""
    result = timeline("layered", 1, 3, 1, Durations(1, 2, 0, gather=5), stage)
    assert [(span.start, str(span.action)) for span in result.collectives[0]][:3] == [
        (0, "GATHER0"),
        (5, "GATHER1"),
        (10, "GATHER2"),
    ]
    exposed = [(str(wait.action), wait.end - wait.start) for wait in result.waits[0]]
    assert exposed[:3] == [("WAIT_GATHER0", 5), ("WAIT_GATHER1", 4), ("WAIT_GATHER2", 4)]


@given(program_specs(), st.integers(0, 9), st.integers(0, 9))
def test_gathers_behind_the_step_expose_no_more_than_deferred_ones(spec, gather, reduce):
    durations = Durations(3, 5, 1, gather, reduce)
    own, deferred = (
        simulate(each, build_program(each), durations)
        for each in (replace(spec, updates="step", offload=None, defers_gathers=defers) for defers in (False, True))
    )
    assert own.step_time <= deferred.step_time


def test_with_groups_stage_1_awaits_every_reduction_at_the_step():
    """Stage 1 holds all gradients from the first group on. The backwards of the last group begin no reduction."""
    spec = ProgramSpec((0,) * 3, "layered", 4, 2, 1, resident_chunks=1)
    *_, third, second, first, step = [action for action in build_program(spec)[0] if action.kind is not Kind.GATHER]
    assert list(map(str, (third, second, first, step))) == ["WAIT_REDUCE2", "WAIT_REDUCE1", "WAIT_REDUCE0", "STEP"]


def test_without_groups_stage_1_awaits_reductions_as_stage_2():
    first, second = (
        simulate(spec, build_program(spec), Durations(1, 2, 0, 3, 5)).waits
        for spec in (ProgramSpec((0,) * 4, "layered", 2, 2, stage, resident_chunks=2) for stage in (1, 2))
    )
    assert first == second
