"""Compute orders: which forward and backward a pipeline rank runs, and when. Schedules differ in nothing else.

Every order backpropagates the micro-batches of a chunk in ascending order, so gradients accumulate in the same order
under every schedule.
"""

from collections.abc import Callable, Iterator

from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.schedule.placement import Placement

SCHEDULES = ("layered", "interleaved_1f1b", "1f1b", "gpipe")
SINGLE_CHUNK_SCHEDULES = ("1f1b", "gpipe")
"""Schedules with one chunk per pipeline rank, in rank order."""


def micro_batch_groups(micro_batches: int, group: int) -> list[range]:
    """The micro-batches of a step cut into groups of ``group``; the last one may be smaller."""
    return [range(start, min(start + group, micro_batches)) for start in range(0, micro_batches, group)]


def layered(placement: Placement, rank: int, micro_batches: int, group: int) -> Iterator[Action]:
    """Layered gradient accumulation (Lamy-Poirier, arXiv 2106.02679): every micro-batch of a group goes through a chunk
    before the next chunk, forward and backward; group after group without a barrier."""
    chunks = chunks_of(placement, rank)
    for members in micro_batch_groups(micro_batches, group):
        yield from _forward(chunks, members)
        for chunk in reversed(chunks):
            for micro_batch in members:
                yield Action(Kind.BACKWARD, chunk, micro_batch)


def gpipe(placement: Placement, rank: int, micro_batches: int, group: int) -> Iterator[Action]:
    """GPipe (arXiv 1811.06965): all forwards, then all backwards. With one chunk per rank that is the layered order."""
    return layered(placement, rank, micro_batches, micro_batches)


def one_forward_one_backward(placement: Placement, rank: int, micro_batches: int, group: int) -> Iterator[Action]:
    """1F1B (PipeDream-flush, arXiv 2006.09503): as many forwards ahead as ranks follow, then alternating."""
    pipeline_ranks = max(placement) + 1
    (chunk,) = chunks_of(placement, rank)
    ahead = min(pipeline_ranks - 1 - rank, micro_batches)
    yield from _forward([chunk], range(ahead))
    for micro_batch in range(micro_batches):
        if micro_batch + ahead < micro_batches:
            yield Action(Kind.FORWARD, chunk, micro_batch + ahead)
        yield Action(Kind.BACKWARD, chunk, micro_batch)


def interleaved(placement: Placement, rank: int, micro_batches: int, group: int) -> Iterator[Action]:
    """Interleaved 1F1B (Megatron-LM, arXiv 2104.04473, section 2.2): modular placement, P micro-batches at a time."""
    pipeline_ranks = max(placement) + 1
    chunks = chunks_of(placement, rank)
    per_round = pipeline_ranks * len(chunks)
    total = micro_batches * len(chunks)

    def nth(index: int, order: list[int]) -> tuple[int, int]:
        rounds, within = divmod(index, per_round)
        return order[within // pipeline_ranks], rounds * pipeline_ranks + within % pipeline_ranks

    backward_chunks = chunks[::-1]
    if micro_batches == pipeline_ranks:
        ahead = total
    else:
        ahead = min(total, 2 * (pipeline_ranks - 1 - rank) + (len(chunks) - 1) * pipeline_ranks)
    for index in range(ahead):
        yield Action(Kind.FORWARD, *nth(index, chunks))
    for index in range(total):
        if index + ahead < total:
            yield Action(Kind.FORWARD, *nth(index + ahead, chunks))
        yield Action(Kind.BACKWARD, *nth(index, backward_chunks))


def forward_only(placement: Placement, rank: int, micro_batches: int, group: int) -> Iterator[Action]:
    """Evaluation: every chunk once, all micro-batches through it."""
    return _forward(chunks_of(placement, rank), range(micro_batches))


def chunks_of(placement: Placement, rank: int) -> list[int]:
    """The chunks that live on ``rank``, ascending."""
    return [chunk for chunk, owner in enumerate(placement) if owner == rank]


def order_of(schedule: str) -> Callable[[Placement, int, int, int], Iterator[Action]]:
    """The order called ``schedule``: a function of placement, pipeline rank, micro-batches and micro-batch group."""
    return _ORDERS[schedule]


def _forward(chunks: list[int], micro_batches: range) -> Iterator[Action]:
    for chunk in chunks:
        for micro_batch in micro_batches:
            yield Action(Kind.FORWARD, chunk, micro_batch)


_ORDERS = {
    "layered": layered,
    "interleaved_1f1b": interleaved,
    "1f1b": one_forward_one_backward,
    "gpipe": gpipe,
}
