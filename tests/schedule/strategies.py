"""Hypothesis strategies for everything that a program is derived from."""

from hypothesis import strategies as st

from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.spec import ProgramSpec


@st.composite
def program_specs(draw, max_ranks: int = 5, max_chunks_per_rank: int = 4, max_micro_batches: int = 9) -> ProgramSpec:
    """Draws a spec of any schedule. Chunks need not be a multiple of ranks, and micro-batches may be fewer than
    ranks."""
    ranks = draw(st.integers(1, max_ranks))
    schedule = draw(st.sampled_from(["layered", "interleaved_1f1b", "1f1b", "gpipe"]))
    micro_batches = draw(st.integers(1, max_micro_batches))
    group, placement = micro_batches, "modular"
    chunks = ranks
    if schedule == "layered":
        placement = draw(st.sampled_from(["modular", "contiguous"]))
        chunks = draw(st.integers(ranks, ranks * max_chunks_per_rank))
        group = draw(st.integers(1, micro_batches))
    elif schedule == "interleaved_1f1b":
        chunks = ranks * draw(st.integers(1, max_chunks_per_rank))
        micro_batches = group = ranks * draw(st.integers(1, 3))
    return ProgramSpec(
        placement=place_chunks(placement, chunks, ranks),
        schedule=schedule,
        micro_batches=micro_batches,
        micro_batch_group=group,
        zero_stage=draw(st.integers(0, 3)),
        resident_chunks=draw(st.integers(1, max_chunks_per_rank + 1)),
        forward_only=draw(st.booleans()),
        defers_gathers=draw(st.booleans()),
        receives_on_arrival=draw(st.booleans()),
    )


def live_micro_batches(spec: ProgramSpec, chunk: int) -> int:
    """Returns how many micro-batches of a layered chunk wait for their backward at once: a group, or at the turn two
    for every chunk that follows, and one more."""
    following = spec.chunks - 1 - chunk
    turns = len(set(spec.placement[chunk:])) == following + 1
    return min(spec.micro_batch_group, 2 * following + 1) if turns else spec.micro_batch_group
