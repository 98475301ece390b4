"""Hypothesis strategies for everything that a program is derived from."""

from collections.abc import Iterable, Iterator

from hypothesis import strategies as st

from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.spec import UPDATES, Hierarchy, Offload, ProgramSpec

HIERARCHIES = [Hierarchy(2, replicated=False), Hierarchy(2, replicated=True)]
OFFLOADING = frozenset({Kind.LOAD, Kind.STORE, Kind.WAIT_LOAD, Kind.WAIT_STORE, Kind.UPDATE})
"""What offloading of optimizer state and parameters adds to a program."""


@st.composite
def program_specs(draw, max_ranks: int = 5, max_chunks_per_rank: int = 4, max_micro_batches: int = 9) -> ProgramSpec:
    """Draws a spec of any schedule. Chunks need not be a multiple of ranks, and micro-batches may be fewer than
    ranks."""
    ranks = draw(st.integers(1, max_ranks))
    schedule = draw(st.sampled_from(["layered", "interleaved_1f1b", "1f1b", "gpipe", "zbv"]))
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
    elif schedule == "zbv":
        placement, chunks = "vee", 2 * ranks
    returns_outputs = draw(st.integers(0, 3)) == 0
    if returns_outputs:
        micro_batches = ranks * draw(st.integers(1, 4))
        group = draw(st.integers(1, micro_batches)) if schedule == "layered" else micro_batches
    zero_stage, updates = draw(st.integers(0, 3)), draw(st.sampled_from(UPDATES))
    hierarchy = draw(st.sampled_from([None, *HIERARCHIES])) if zero_stage == 3 else None
    offload = draw(offloads(zero_stage, updates)) if hierarchy is None else None
    overlaps = draw(st.integers(0, 3)) == 0
    kept = frozenset() if overlaps else draw(st.just(frozenset()) | kept_pairs(chunks, micro_batches))
    gathers_updates = zero_stage in (1, 2) or (hierarchy is not None and not hierarchy.replicated)
    return ProgramSpec(
        placement=place_chunks(placement, chunks, ranks),
        schedule=schedule,
        micro_batches=micro_batches,
        micro_batch_group=group,
        zero_stage=zero_stage,
        resident_chunks=draw(st.integers(1, max_chunks_per_rank + 1)),
        forward_only=not returns_outputs and draw(st.booleans()),
        defers_gathers=(gathers_updates and (updates == "next_step" or offload is not None)) or draw(st.booleans()),
        updates=updates,
        receives_on_arrival=draw(st.booleans()),
        hierarchy=hierarchy,
        offload=offload,
        # Mostly, everything trains.
        first_trained=draw(st.just(0) | st.integers(0, chunks - 1)),
        returns_outputs=returns_outputs,
        recomputes=draw(st.integers(0, 3)) > 0,
        kept=kept,
        selective=draw(st.frozensets(st.sampled_from(sorted(kept)))) if kept else kept,
        split_backward=0 if overlaps else draw(st.just(0) | st.integers(1, 5)),
        overlaps_exchanges=overlaps,
        whole_chunks=draw(st.just(frozenset()) | st.frozensets(st.integers(0, chunks - 1))),
    )


def kept_pairs(chunks: int, micro_batches: int) -> st.SearchStrategy[frozenset[tuple[int, int]]]:
    """Draws pairs of chunk and micro-batch of which autograd keeps what it has saved."""
    return st.frozensets(st.tuples(st.integers(0, chunks - 1), st.integers(0, micro_batches - 1)))


def offloads(zero_stage: int, updates: str) -> st.SearchStrategy[Offload | None]:
    """Draws what the host may hold under a stage and a way to update."""
    if zero_stage == 0 or updates == "step":
        return st.none()
    parameters = (False, True) if zero_stage == 3 else (False,)
    return st.sampled_from([None, *(Offload(each, alone=alone) for each in parameters for alone in (False, True))])


def live_micro_batches(spec: ProgramSpec, chunk: int) -> int:
    """Returns how many micro-batches of a layered chunk wait for their backward at once: a group, or at the turn two
    for every chunk that follows, and one more; all where the script computes the loss."""
    if spec.returns_outputs:
        return spec.micro_batches
    following = spec.chunks - 1 - chunk
    turns = len(set(spec.placement[chunk:])) == following + 1
    return min(spec.micro_batch_group, 2 * following + 1) if turns else spec.micro_batch_group


def pieces_of(actions: Iterable[Action]) -> Iterator[list[Action]]:
    """Yields ``actions`` in pieces, cut after each RETURN."""
    piece: list[Action] = []
    for action in actions:
        piece.append(action)
        if action.kind is Kind.RETURN:
            yield piece
            piece = []
    yield piece
