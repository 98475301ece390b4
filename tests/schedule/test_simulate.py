import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import ProgramSpec, build_program
from ds_lgamp.schedule.simulate import UNIT_DURATIONS, Durations, simulate
from tests.schedule.strategies import program_specs


def timeline(schedule, ranks, chunks_per_rank, micro_batches, durations=UNIT_DURATIONS, stage=0):
    placement = place_chunks("modular", ranks * chunks_per_rank, ranks)
    spec = ProgramSpec(placement, schedule, micro_batches, micro_batches, stage)
    return simulate(spec, build_program(spec), durations)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 12))
def test_layered_step_time(ranks, chunks_per_rank, micro_batches):
    """t [(N - 1) max(M, P) + M + P - 1] with t = forward + backward; M below P included."""
    larger = max(micro_batches, ranks)
    expected = 3 * ((chunks_per_rank - 1) * larger + micro_batches + ranks - 1)
    assert timeline("layered", ranks, chunks_per_rank, micro_batches).step_time == expected


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_bubble_of_one_chunk_per_rank(schedule):
    assert timeline(schedule, 4, 1, 8).bubble == pytest.approx(3 / 8)


@pytest.mark.parametrize("schedule", ["layered", "interleaved_1f1b"])
def test_bubble_shrinks_by_the_chunks_per_rank(schedule):
    assert timeline(schedule, 4, 4, 8).bubble == pytest.approx(3 / (4 * 8))


def test_a_hop_hurts_interleaved_more_than_layered():
    """10 and 20 ms of compute, 1 MiB over 1 Gbit/s."""
    durations = Durations(0.010, 0.020, 2**20 * 8 / 1e9)
    layered = timeline("layered", 4, 4, 8, durations).bubble
    assert layered < 0.5 * timeline("interleaved_1f1b", 4, 4, 8, durations).bubble


def test_a_hop_delays_the_receiver_only():
    assert timeline("gpipe", 2, 1, 3, Durations(1, 2, 5)).step_time == 1 * 3 + 2 * 3 + (1 + 2) + 2 * 5


def test_layered_without_a_pipeline_has_no_bubble():
    assert timeline("layered", 1, 6, 4).bubble == 0


@given(program_specs())
def test_no_rank_computes_two_things_at_once(spec):
    result = simulate(spec, build_program(spec))
    for spans in result.spans:
        assert all(before.end <= after.start for before, after in zip(spans, spans[1:]))
