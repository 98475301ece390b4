"""The closed forms beside the clock.

Where :func:`step_time` says that both are equal, properties compare them to rounding. Elsewhere the largest error over
a fixed draw is part of the specification.
"""

from random import Random
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_lgamp.schedule.closed_form import Shape, step_time
from ds_lgamp.schedule.costs import Durations
from ds_lgamp.schedule.orders import default_placement
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_timed_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import ProgramSpec


def on_the_clock(shape, durations, defers_gathers=False):
    ranks = shape.pipeline_ranks
    spec = ProgramSpec(
        place_chunks(default_placement(shape.schedule), ranks * shape.chunks_per_rank, ranks),
        shape.schedule,
        shape.micro_batches,
        shape.micro_batch_group or shape.micro_batches,
        shape.zero_stage,
        shape.resident_chunks,
        defers_gathers=defers_gathers,
    )
    return simulate(spec, build_timed_program(spec), durations, sends_at_once=True).step_time


@st.composite
def exact_cases(draw, schedule, max_ranks=6, max_chunks_per_rank=5, max_micro_batches=20):
    """Draws a shape and durations for which the closed form is exact, and whether gathers are deferred, which makes no
    difference. Collectives may take several visits."""
    ranks = draw(st.integers(1, max_ranks))
    chunks = draw(st.integers(1, max_chunks_per_rank)) if schedule in ("layered", "interleaved_1f1b") else 1
    micro_batches = draw(st.integers(1, max_micro_batches))
    if schedule == "interleaved_1f1b":
        micro_batches = ranks * -(-micro_batches // ranks)
    stage = draw(st.integers(0, 3))
    group = draw(st.integers(1, micro_batches)) if schedule == "layered" and stage <= 1 else None
    resident = draw(st.integers(1, max_chunks_per_rank))
    if schedule == "interleaved_1f1b" and stage == 3:
        resident = max(resident, chunks)
    forward, backward = draw(st.integers(2, 12)), draw(st.integers(2, 12))
    recompute = 0 if schedule in ("1f1b", "interleaved_1f1b") else draw(st.integers(0, 12))
    hop = draw(st.floats(0, 1)) * (forward + backward + recompute) / 2
    visit = forward * (ranks if schedule == "interleaved_1f1b" else group or micro_batches)
    durations = Durations(
        forward,
        backward,
        hop,
        gather=draw(st.floats(0, 2)) * visit,
        reduce=draw(st.floats(0, 2)) * visit,
        message=draw(st.floats(0, 1)) * min(hop, forward, backward),
        recompute=recompute,
        update=draw(st.integers(0, 9)),
    )
    return Shape(schedule, ranks, chunks, micro_batches, stage, resident, group), durations, draw(st.booleans())


@pytest.mark.parametrize("schedule", ["layered", "interleaved_1f1b", "1f1b", "gpipe"])
def test_the_closed_form_equals_the_clock(schedule):
    @settings(max_examples=40)
    @given(exact_cases(schedule))
    def equal(case):
        assert step_time(*case[:2]) == pytest.approx(on_the_clock(*case), rel=1e-9)

    equal()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["layered", "interleaved_1f1b", "1f1b", "gpipe"])
def test_the_closed_form_equals_the_clock_for_larger_programs(schedule):
    @settings(max_examples=200)
    @given(exact_cases(schedule, 16, 8, 64))
    def equal(case):
        assert step_time(*case[:2]) == pytest.approx(on_the_clock(*case), rel=1e-9)

    equal()


def test_without_hops_a_layered_step_is_the_published_bubble():
    """t [(N - 1) max(M, P) + M + P - 1], also for M below P."""
    for ranks, chunks, micro_batches in ((1, 4, 3), (4, 1, 8), (4, 4, 8), (4, 4, 3), (8, 2, 1)):
        expected = 3 * ((chunks - 1) * max(micro_batches, ranks) + micro_batches + ranks - 1)
        assert step_time(Shape("layered", ranks, chunks, micro_batches), Durations(1, 2)) == expected


def test_a_wrap_around_hop_hides_while_micro_batches_outnumber_ranks_and_their_hops():
    """P (f + h) = 4 x 1.5 = 6 and P (b + h) = 4 x 2.5 = 10: six micro-batches of 1 and of 2 hide both."""
    durations = Durations(1, 2, hop=0.5)
    assert step_time(Shape("layered", 4, 3, 6), durations) == 3 * (2 * 6 + 6 + 3) + 6 * 0.5
    assert step_time(Shape("layered", 4, 3, 5), durations) == 3 * (2 * 5 + 5 + 3) + 6 * 0.5 + 2 * (6 - 5)


def test_one_resident_chunk_exposes_the_gathers_that_two_hide():
    durations = Durations(1, 2, gather=4, reduce=4)
    one, two = (step_time(Shape("layered", 1, 4, 8, 3, resident), durations) for resident in (1, 2))
    # The first gather and the last reduction are exposed in any case, with one resident chunk all of each.
    assert two == 4 * 8 * 3 + 2 * 4 and one == 4 * 8 * 3 + (2 * 4 - 1) * 4 + 4 * 4


@pytest.mark.parametrize(
    "shape",
    [
        # Chunks alternate, so each chunk's first backward is long past when reductions begin.
        Shape("interleaved_1f1b", 2, 4, 8, 1, resident_chunks=1),
        # They do not alternate here: M = P.
        Shape("interleaved_1f1b", 4, 4, 4, 1, resident_chunks=1),
        # Stage 1 accumulates through both groups. The second begins no gradient anew.
        Shape("layered", 2, 4, 8, 1, resident_chunks=1, micro_batch_group=4),
        # Stage 2 reduces in each group.
        Shape("layered", 2, 4, 8, 2, resident_chunks=1, micro_batch_group=4),
        Shape("layered", 2, 4, 8, 2, resident_chunks=1),
    ],
)
def test_backwards_wait_for_reductions_only_where_a_gradient_begins(shape):
    durations = Durations(1, 2, hop=0.3, gather=1, reduce=9)
    assert step_time(shape, durations) == pytest.approx(on_the_clock(shape, durations), rel=1e-9)


def worst_error(
    schedule, hops=0.5, recompute=(0, 1), messages=0.0, stages=(0, 1, 2, 3), collectives=0.5, in_groups=False, cases=40
):
    """Returns the largest relative error over a fixed draw of P to 16, N to 8 and M to 64.

    Args:
        hops: the longest hop in units of t.
        recompute: recomputation in units of a forward.
        messages: the longest message in units of its hop.
        collectives: the longest gather or reduction, in units of the forwards of a visit.
        in_groups: whether micro-batches come in groups.
    """
    random, worst = Random(0), 0.0
    for _ in range(cases):
        ranks, micro_batches = random.randint(1, 16), random.randint(1, 64)
        chunks = random.randint(1, 8) if schedule in ("layered", "interleaved_1f1b") else 1
        if schedule == "interleaved_1f1b":
            micro_batches = ranks * max(1, round(micro_batches / ranks))
        backward, again = random.choice((1, 1.5, 2, 3)), random.choice(recompute)
        hop = random.uniform(0, hops) * (1 + backward + again)
        group = random.randint(1, micro_batches) if in_groups else micro_batches
        longest = collectives * (ranks if schedule == "interleaved_1f1b" else group)
        gather, reduce = random.uniform(0, longest), random.uniform(0, longest)
        durations = Durations(1, backward, hop, gather, reduce, random.uniform(0, messages) * hop, again)
        shape = Shape(schedule, ranks, chunks, micro_batches, random.choice(stages), random.randint(1, 4), group)
        worst = max(worst, abs(step_time(shape, durations) / on_the_clock(shape, durations) - 1))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "draw", "bound"),
    [
        ("1f1b", {"hops": 1}, 0.03),
        ("layered", {"hops": 1}, 0.03),
        ("interleaved_1f1b", {"hops": 1, "stages": (0, 1, 2)}, 0.03),
        ("layered", {"messages": 1}, 0.03),
        ("layered", {"in_groups": True, "collectives": 2, "stages": (2, 3)}, 0.03),
        ("interleaved_1f1b", {"messages": 1, "stages": (0, 1, 2)}, 0.03),
        ("1f1b", {"messages": 1}, 0.03),
        ("gpipe", {"hops": 1, "messages": 1}, 0.03),
        # Two chunks of one rank alternate there, and each needs its gather.
        ("interleaved_1f1b", {"stages": (3,)}, 0.15),
    ],
)
def test_an_approximation_is_no_further_off_than_this(schedule, draw, bound):
    assert worst_error(schedule, **draw, cases=150) <= bound


def test_the_approximation_of_1f1b_with_recomputation_is_within_three_percent():
    assert worst_error("1f1b") <= 0.03


@pytest.mark.parametrize("schedule", ["layered", "1f1b", "gpipe"])
def test_on_a_slow_network_the_closed_form_is_close_to_the_clock(schedule):
    """Hops take up to thirty times as long as the compute of a chunk, and messages up to all of a hop."""
    several = schedule == "layered"

    @settings(max_examples=100)
    @given(
        st.integers(2, 16),
        st.integers(1, 6 if several else 1),
        st.integers(1, 32),
        st.sampled_from([1, 1.5, 2, 3]),
        st.sampled_from([0, 1]),
        st.floats(0, 30),
        st.floats(0, 1),
    )
    def close(ranks, chunks, micro_batches, backward, recompute, hop, share):
        hop *= 1 + backward + recompute
        durations = Durations(1, backward, hop, message=share * hop, recompute=recompute)
        shape = Shape(schedule, ranks, chunks, micro_batches)
        assert 0.75 <= step_time(shape, durations) / on_the_clock(shape, durations) <= 1.1

    close()


def test_two_ranks_send_one_message_for_each_micro_batch_in_each_direction():
    """Compute of 1 + 1 hides behind messages of 4: eight of them leave one after another."""
    shape, durations = Shape("layered", 2, 1, 8), Durations(1, 1, hop=4, message=4)
    assert step_time(shape, durations) == on_the_clock(shape, durations) == 2 + 2 + 2 * 4 + 7 * 4


def test_a_rank_between_others_sends_two_messages_for_each_micro_batch():
    """One forward, 15 messages of 4 and the last one's hop, and what is left of the way there and back."""
    shape, durations = Shape("layered", 3, 1, 8), Durations(1, 1, hop=4, message=4)
    assert step_time(shape, durations) == on_the_clock(shape, durations) == 1 + 15 * 4 + 2 * 4 + 1 + 1


@pytest.mark.timing
@pytest.mark.parametrize("schedule", ["layered", "interleaved_1f1b"])
def test_a_candidate_takes_well_under_a_millisecond(schedule):
    shape, durations = Shape(schedule, 64, 16, 512, 3), Durations(1, 2, 0.1, 1, 1, 0.05, 1)
    begin = process_time()
    for _ in range(100):
        step_time(shape, durations)
    assert (process_time() - begin) / 100 < 0.3e-3


@pytest.mark.timing
@pytest.mark.parametrize("schedule", ["layered", "interleaved_1f1b"])
def test_the_clock_runs_a_million_computes_in_half_a_minute(schedule):
    """64 pipeline ranks, 16 chunks each, 512 micro-batches, ZeRO-3 with all chunks resident."""
    shape, durations = Shape(schedule, 64, 16, 512, 3, 16), Durations(1, 2, 0.1, 1, 1, 0.05)
    begin = process_time()
    step = on_the_clock(shape, durations)
    assert process_time() - begin < 30
    assert step_time(shape, durations) == pytest.approx(step, rel=1e-9)
