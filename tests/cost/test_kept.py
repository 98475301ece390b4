"""Which forwards autograd keeps within a budget of memory."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.cost.activations import ActivationBytes, ChunkBytes
from ds_lgamp.cost.budget import Decision, _Peaks, kept_within
from ds_lgamp.cost.memory import memory_over_time
from ds_lgamp.cost.units import ElementBytes, Sharding, UnitSize
from ds_lgamp.schedule.costs import Durations
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_program, build_rank_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.validate import ProgramError, validate
from tests.schedule.strategies import program_specs

BYTES = st.integers(0, 200)
RESULT = 100


@st.composite
def sizes(draw, chunks: int) -> ActivationBytes:
    """Draws bytes of chunks that differ, if they are recomputed, whole or by their layers, and if they are kept."""
    measured, by_layers = [], draw(st.booleans())
    for chunk in range(chunks):
        result = 0 if chunk == chunks - 1 else RESULT
        saved, transient = draw(BYTES), draw(BYTES)
        keeps_result = result > 0 and draw(st.booleans())
        kept = ChunkBytes(result, result + saved + transient, transient, saved, keeps_result)
        left = draw(st.integers(0, saved)) if by_layers else 0
        selective = None
        if not by_layers and draw(st.booleans()):
            part = draw(st.integers(0, saved))
            selective = replace(kept, saved=part, backward=transient + saved - part)
        measured.append(ChunkBytes(result, result + transient, saved + transient, left, kept=kept, selective=selective))
    states = draw(BYTES), draw(st.booleans())
    return ActivationBytes(draw(BYTES), draw(BYTES), measured, *states, by_layers=by_layers)


def follow(spec, rank, size, actions):
    """Returns the peak during each action of a rank with small units."""
    units = [UnitSize(32, 32, (chunk,)) for chunk, owner in enumerate(spec.placement) if owner == rank]
    return memory_over_time(actions, units, Sharding(spec.zero_stage, 1), ElementBytes(), size, offload=spec.offload)[1]


def program(spec, rank, decision):
    return build_rank_program(replace(spec, **decision._asdict()), rank)


def chosen(spec, rank, size, budget):
    return kept_within(budget, partial(program, spec, rank), partial(follow, spec, rank, size), size)


def peak(spec, rank, size, decision):
    return max(follow(spec, rank, size, program(spec, rank, decision)))


def everything(spec, rank):
    own = [chunk for chunk in spec.recomputed_chunks if spec.placement[chunk] == rank]
    return Decision(frozenset((chunk, micro_batch) for chunk in own for micro_batch in range(spec.micro_batches)))


TRAINING = (
    program_specs(max_ranks=3)
    .filter(lambda spec: not spec.forward_only and spec.hierarchy is None)
    .map(lambda spec: replace(spec, overlaps_exchanges=False))
)


@given(TRAINING.map(lambda spec: replace(spec, kept=frozenset())), st.data())
def test_no_budget_is_exceeded_and_one_that_holds_everything_keeps_everything(spec, data):
    size, rank = data.draw(sizes(spec.chunks)), data.draw(st.integers(0, spec.pipeline_ranks - 1))
    whole = everything(spec, rank)
    least, most = (peak(spec, rank, size, decision) for decision in (Decision(), whole))
    budget = data.draw(st.integers(min(least, most), max(least, most)))
    found = chosen(spec, rank, size, budget)
    assert found.selective <= found.kept <= whole.kept
    assert all(size.chunks[chunk].selective is not None for chunk, _ in found.selective)
    assert peak(spec, rank, size, found) <= max(budget, least), "but for what nothing could save"
    assert chosen(spec, rank, size, 2 * max(least, most) + 10_000) == whole
    marked = replace(spec, **found._asdict())
    validate(marked, build_program(marked))


@pytest.mark.parametrize(
    ("schedule", "ranks", "per_rank", "group"),
    [("layered", 1, 6, 12), ("layered", 2, 4, 4), ("interleaved_1f1b", 2, 3, 12), ("1f1b", 3, 1, 12)],
)
def test_more_memory_makes_a_shorter_step_and_half_of_it_saves_nearly_half(schedule, ranks, per_rank, group):
    """Chunks are alike. Of what recomputation costs, half of the memory saves a third at least; but not with one chunk
    on each rank, where ranks wait for each other while they recompute other micro-batches."""
    spec = ProgramSpec(place_chunks("modular", ranks * per_rank, ranks), schedule, 12, group, 0)
    kept = ChunkBytes(RESULT, 1200, 300, saved=1000)
    size = ActivationBytes(0, 0, [ChunkBytes(RESULT, 300, 1300, kept=kept)] * spec.chunks)
    times = []
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        pairs = set()
        for rank in range(ranks):
            least, most = (peak(spec, rank, size, decision) for decision in (Decision(), everything(spec, rank)))
            pairs |= chosen(spec, rank, size, round(least + part * (most - least))).kept
        marked = replace(spec, kept=frozenset(pairs))
        times.append(simulate(marked, build_program(marked), Durations(1, 2, recompute=1)).step_time)
    assert times == sorted(times, reverse=True) and times[0] > times[-1], times
    assert per_rank == 1 or times[0] - times[2] >= (times[0] - times[-1]) / 3, times


def test_what_is_alive_shortest_is_kept_first_in_every_group():
    """Chunks 0 to 3 on one rank, in two groups. Chunk 3 turns at once, so chunk 2 has the shortest way back."""
    spec = ProgramSpec((0,) * 4, "layered", 4, 2, 0)
    both = ChunkBytes(RESULT, 0, 0, kept=ChunkBytes(RESULT, 0, 0, saved=1000))
    size = ActivationBytes(0, 0, [both] * 4)
    least = peak(spec, 0, size, Decision())
    assert chosen(spec, 0, size, least + 2000).kept == {(2, micro_batch) for micro_batch in range(4)}
    assert chosen(spec, 0, size, least + 1000).kept == {(2, 0), (2, 2)}, "one of each group"


def test_of_two_chunks_the_one_that_computes_more_for_its_bytes_is_kept():
    spec = ProgramSpec((0,) * 3, "layered", 1, 1, 0)
    both = ChunkBytes(RESULT, 0, 0, kept=ChunkBytes(RESULT, 0, 0, saved=1000))
    size = ActivationBytes(0, 0, [both] * 3, flops=[9000, 1000, 1000])
    assert chosen(spec, 0, size, peak(spec, 0, size, Decision()) + 1000).kept == {(0, 0)}


def test_where_layers_recompute_by_themselves_what_they_leave_is_there_in_both_ways():
    """Chunk 0 is alive longest, but its layers leave nearly all that autograd would keep."""
    spec = ProgramSpec((0,) * 3, "layered", 1, 1, 0)
    kept = ChunkBytes(RESULT, 0, 0, saved=1000)
    chunks = [ChunkBytes(RESULT, 0, 0, saved=left, kept=kept) for left in (900, 100, 100)]
    size = ActivationBytes(0, 0, chunks, flops=[1000] * 3, by_layers=True)
    least = peak(spec, 0, size, Decision())
    assert peak(spec, 0, size, everything(spec, 0)) == least + 100 + 900
    assert chosen(spec, 0, size, least + 900).kept == {(0, 0)}


def test_layers_recompute_a_part_in_every_chunk_before_one_keeps_all():
    """What is alive shortest then is the first to keep all."""
    spec = ProgramSpec((0,) * 4, "layered", 1, 1, 0)
    kept, part = (ChunkBytes(RESULT, 0, 0, saved=saved) for saved in (1000, 200))
    size = ActivationBytes(0, 0, [ChunkBytes(RESULT, 0, 0, kept=kept, selective=part)] * 4)
    least, pairs = peak(spec, 0, size, Decision()), {(chunk, 0) for chunk in range(3)}
    assert chosen(spec, 0, size, least + 600) == (pairs, pairs)
    assert chosen(spec, 0, size, least + 1400) == (pairs, pairs - {(2, 0)})
    assert chosen(spec, 0, size, least + 3000) == (pairs, set())


def test_only_what_is_kept_in_part_may_keep_all():
    """Chunk 1 would need little more to keep all, but has no room to keep a part."""
    spec = ProgramSpec((0,) * 4, "layered", 1, 1, 0)
    part = ChunkBytes(RESULT, 0, 0, saved=800)
    sizes = [
        ChunkBytes(RESULT, 0, 0, kept=replace(part, saved=saved), selective=part) for saved in (1000, 850, 1000, 1000)
    ]
    size = ActivationBytes(0, 0, sizes)
    assert chosen(spec, 0, size, peak(spec, 0, size, Decision()) + 860) == ({(2, 0)}, {(2, 0)})


def test_where_a_part_leaves_as_much_as_the_whole_layers_keep_all():
    spec = ProgramSpec((0,) * 2, "layered", 1, 1, 0)
    kept = ChunkBytes(RESULT, 0, 0, saved=1000)
    size = ActivationBytes(0, 0, [ChunkBytes(RESULT, 0, 0, kept=kept, selective=kept)] * 2)
    assert chosen(spec, 0, size, peak(spec, 0, size, Decision()) + 1000) == ({(0, 0)}, set())


def test_a_program_that_keeps_what_its_spec_recomputes_is_refused():
    spec = ProgramSpec((0, 1, 0, 1), "layered", 2, 2, 0)
    with pytest.raises(ProgramError, match=r"F2.1 is to be recomputed"):
        validate(spec, build_program(replace(spec, kept=frozenset({(2, 1)}))))
    with pytest.raises(ProgramError, match=r"F2.1 is not to be recomputed"):
        validate(replace(spec, kept=frozenset({(2, 1)})), build_program(spec))
    in_part = replace(spec, kept=frozenset({(2, 1)}), selective=frozenset({(2, 1)}))
    with pytest.raises(ProgramError, match=r"F2.1 has layers that do not recompute a part of themselves"):
        validate(in_part, build_program(replace(spec, kept=frozenset({(2, 1)}))))
    with pytest.raises(ProgramError, match=r"F2.1 has layers that recompute a part of themselves"):
        validate(replace(spec, kept=frozenset({(2, 1)})), build_program(in_part))


@given(st.lists(BYTES, min_size=1, max_size=20), st.data())
def test_the_tree_of_peaks_is_the_largest_number(numbers, data):
    peaks = _Peaks(numbers)
    for _ in range(data.draw(st.integers(0, 8))):
        start = data.draw(st.integers(0, len(numbers)))
        end, amount = data.draw(st.integers(0, len(numbers))), data.draw(st.integers(-300, 300))
        peaks.add(start, end, amount)
        numbers = [each + amount * (start <= place < end) for place, each in enumerate(numbers)]
        # Places behind the end of the program have nothing.
        assert peaks.highest == max(max(numbers), 0) or len(numbers) == peaks._leaves
