"""Work by speed: how layers and micro-batches are shared, and what the clock makes of it."""

from itertools import accumulate, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_lgamp.schedule.closed_form import Shape, step_time
from ds_lgamp.schedule.costs import Durations, sized_costs
from ds_lgamp.schedule.placement import place_chunks, shares_by_speed, split_by_speed, split_evenly
from ds_lgamp.schedule.program import build_program, build_timed_program, collectives_agree
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import Hierarchy, ProgramSpec
from ds_lgamp.schedule.validate import validate

SPEEDS = st.lists(st.sampled_from([0.5, 1.0, 1.2, 1.5, 2.0, 3.0, 7.0]), min_size=1, max_size=4)


@given(SPEEDS, st.integers(1, 3), st.integers(0, 12))
def test_no_other_shares_are_done_sooner(speeds, least, more):
    items = least * len(speeds) + more
    shares = shares_by_speed(items, speeds, least)
    assert sum(shares) == items and min(shares) >= least

    def done(of_each):
        return max(share / speed for share, speed in zip(of_each, speeds))

    others = product(range(least, least + more + 1), repeat=len(speeds))
    assert done(shares) == min(done(other) for other in others if sum(other) == items)


def test_shares_can_be_given_as_speeds():
    assert shares_by_speed(8, [6, 2]) == [6, 2] and shares_by_speed(4, [6, 2]) == [3, 1]
    assert shares_by_speed(7, [1, 1, 1]) == [3, 2, 2]
    assert shares_by_speed(3, [100, 1, 1]) == [1, 1, 1]


@given(SPEEDS, st.integers(1, 4), st.integers(0, 30), st.sampled_from(["modular", "contiguous"]))
def test_the_layers_of_a_rank_follow_its_speed_and_its_chunks_are_even(speeds, chunks_per_rank, more, kind):
    ranks = len(speeds)
    layers = ranks * chunks_per_rank + more
    placement = place_chunks(kind, ranks * chunks_per_rank, ranks)
    bounds = split_by_speed(layers, placement, speeds)
    sizes = [end - start for start, end in pairwise(bounds)]
    of_ranks = [[size for size, owner in zip(sizes, placement) if owner == rank] for rank in range(ranks)]
    assert bounds[0] == 0 and bounds[-1] == layers and min(sizes) >= 1
    assert [sum(of_rank) for of_rank in of_ranks] == shares_by_speed(layers, speeds, chunks_per_rank)
    assert all(max(of_rank) - min(of_rank) <= 1 for of_rank in of_ranks)


def on_the_clock(schedule, ranks, bounds, micro_batches, speeds, durations):
    placement = place_chunks("modular", len(bounds) - 1, ranks)
    spec = ProgramSpec(placement, schedule, micro_batches, micro_batches, zero_stage=0)
    costs = sized_costs(spec, durations, [end - start for start, end in pairwise(bounds)], speeds)
    return simulate(spec, build_timed_program(spec), costs, sends_at_once=True)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(1, 12),
    st.sampled_from(["layered", "interleaved_1f1b"]),
    st.floats(0, 1),
)
def test_whole_speeds_have_the_bubble_of_equal_ranks(speeds, chunks_per_rank, micro_batches, schedule, hop):
    """Chunks then take one unit of time on every rank: (P - 1) / (N M) of the ideal time is lost, without hops."""
    ranks = len(speeds)
    micro_batches *= ranks if schedule == "interleaved_1f1b" else 1
    durations = Durations(forward=1, backward=2, hop=hop if schedule == "layered" else 0)
    layers = chunks_per_rank * sum(speeds)
    placement = place_chunks("modular", ranks * chunks_per_rank, ranks)
    by_speed = on_the_clock(
        schedule, ranks, split_by_speed(layers, placement, speeds), micro_batches, speeds, durations
    )
    expected = step_time(Shape(schedule, ranks, chunks_per_rank, micro_batches), durations)
    assert by_speed.step_time == pytest.approx(expected)
    if hop == 0 and micro_batches >= ranks:
        assert by_speed.bubble == pytest.approx((ranks - 1) / (chunks_per_rank * micro_batches))
        even = split_evenly(layers, ranks * chunks_per_rank)
        equal = on_the_clock(schedule, ranks, even, micro_batches, speeds, durations)
        # Some rank has at least the ideal time to compute. Equal chunks can win back no more than the bubble.
        assert by_speed.step_time <= (equal.step_time + 3 * (ranks - 1)) * (1 + 1e-9)


@given(SPEEDS, st.integers(1, 4), st.integers(0, 30), st.integers(1, 12))
def test_the_slowest_chunk_bounds_the_step(speeds, chunks_per_rank, more, micro_batches):
    """Where layers do not divide by the speeds: t [(N - 1) max(M, P) + M + P - 1] with t of the slowest chunk. No rank
    has more to do than the busiest one would with equal chunks."""
    ranks, durations = len(speeds), Durations()
    chunks = ranks * chunks_per_rank
    layers, placement = chunks + more, place_chunks("modular", chunks, ranks)
    bounds = split_by_speed(layers, placement, speeds)
    timeline = on_the_clock("layered", ranks, bounds, micro_batches, speeds, durations)
    slowest = max((end - start) / speeds[rank] for (start, end), rank in zip(pairwise(bounds), placement))
    visits = (chunks_per_rank - 1) * max(micro_batches, ranks) + micro_batches + ranks - 1
    assert timeline.step_time <= 3 * slowest * visits * (1 + 1e-9)

    def busiest(cut):
        busy = [0.0] * ranks
        for (start, end), rank in zip(pairwise(cut), placement):
            busy[rank] += (end - start) / speeds[rank]
        return max(busy)

    assert busiest(bounds) <= busiest(split_evenly(layers, chunks)) * (1 + 1e-9)


def test_twice_the_speed_takes_close_to_the_ideal_time():
    """24 layers on two ranks, one twice as fast, 8 micro-batches: equal chunks take half as long again."""
    placement = place_chunks("modular", 16, 2)
    bounds = split_by_speed(24, placement, [2, 1])
    assert [end - start for start, end in pairwise(bounds)] == [2, 1] * 8
    by_speed = on_the_clock("layered", 2, bounds, 8, [2, 1], Durations())
    equal = on_the_clock("layered", 2, list(accumulate([1] * 24, initial=0)), 8, [2, 1], Durations())
    ideal = 24 * 8 * 3 / 3
    assert by_speed.step_time / ideal == pytest.approx(1 + 1 / 64)
    assert equal.step_time / ideal > 1.5


@st.composite
def replicas(draw, group_all: bool):
    ranks = draw(st.integers(1, 4))
    chunks = draw(st.integers(ranks, 4 * ranks))
    placement = place_chunks(draw(st.sampled_from(["modular", "contiguous"])), chunks, ranks)
    stage, resident = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    counts = draw(st.lists(st.integers(1, 9), min_size=2, max_size=3))
    group = draw(st.integers(1, 4))
    arrival, defers = draw(st.booleans()), draw(st.booleans())
    return [
        ProgramSpec(
            placement,
            "layered",
            count,
            count if group_all else min(group, count),
            stage,
            resident,
            defers_gathers=defers,
            receives_on_arrival=arrival,
        )
        for count in counts
    ]


@settings(max_examples=50)
@given(replicas(group_all=True))
def test_layered_replicas_communicate_alike_whatever_their_micro_batches(specs):
    assert collectives_agree(specs)
    for spec in specs:
        validate(spec, build_program(spec))


@given(replicas(group_all=False))
def test_groups_agree_if_there_are_equally_many_or_if_nothing_moves_between_them(specs):
    numbers = {-(-spec.micro_batches // spec.micro_batch_group) for spec in specs}
    spec = specs[0]
    if len(numbers) == 1 or spec.zero_stage <= 1:
        assert collectives_agree(specs)
    elif spec.zero_stage == 2:
        assert not collectives_agree(specs)


@pytest.mark.parametrize(("counts", "agree"), [((2, 3), True), ((2, 9), True), ((1, 3), False)])
def test_what_travels_between_nodes_is_in_one_order_with_what_stays_inside(counts, agree):
    """With one micro-batch, the sum between nodes waits for the next chunk's reduction."""
    specs = [
        ProgramSpec((0,) * 4, "layered", count, count, 3, hierarchy=Hierarchy(2, replicated=True)) for count in counts
    ]
    assert collectives_agree(specs) == agree
