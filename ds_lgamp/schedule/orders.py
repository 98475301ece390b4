"""Compute orders: when each pipeline rank runs which forward and backward. Schedules differ only in this.

Every order runs the backwards of a chunk in ascending micro-batches. Gradients therefore accumulate in the same order
under every schedule.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator

from ds_lgamp.schedule.actions import Action, Kind, Segments
from ds_lgamp.schedule.placement import Placement

Order = Callable[[Placement, int, int, int], Iterator[Action]]
"""Returns the computes of a rank, from placement, pipeline rank, micro-batches and micro-batch group."""
SINGLE_CHUNK_SCHEDULES = ("1f1b", "gpipe")
"""Schedules that need one chunk per pipeline rank, in rank order."""


def default_placement(schedule: str) -> str:
    """Returns the default placement of ``schedule``."""
    if schedule == "zbv":
        return "vee"
    return "contiguous" if schedule in SINGLE_CHUNK_SCHEDULES else "modular"


def micro_batch_groups(micro_batches: int, group: int) -> list[range]:
    """Splits the micro-batches of a step into groups of ``group``. The last group may be smaller."""
    return [range(start, min(start + group, micro_batches)) for start in range(0, micro_batches, group)]


def layered(placement: Placement, rank: int, micro_batches: int, group: int) -> Iterator[Action]:
    """Layered gradient accumulation (Lamy-Poirier, arXiv 2106.02679).

    All micro-batches of a group pass through a chunk before the next chunk starts, both forward and backward. The
    groups follow each other without a barrier.

    At the turn, the forwards and backwards of a rank's last chunk alternate, as in Megatron-LM's interleaved 1F1B
    (arXiv 2104.04473). The rank warms up with two forwards for every chunk of the model after its last one. Each
    backward of the model's last chunk then directly follows its forward, so only one micro-batch at a time has logits.
    """
    chunks, turn = chunks_of(placement, rank), first_turning_chunk(placement)
    for members in micro_batch_groups(micro_batches, group):
        forwards = list(_forward(chunks, members))
        backwards = [Action(Kind.BACKWARD, chunk, micro_batch) for chunk in reversed(chunks) for micro_batch in members]
        warm_up = len(forwards)
        if chunks[-1] >= turn:
            warm_up = min(warm_up, len(members) * (len(chunks) - 1) + 2 * (len(placement) - 1 - chunks[-1]))
        yield from forwards[:warm_up]
        late = forwards[warm_up:]
        for forward, backward in zip(late, backwards):
            yield from (forward, backward)
        yield from backwards[len(late) :]


def gpipe(placement: Placement, rank: int, micro_batches: int, group: int) -> Iterator[Action]:
    """GPipe (arXiv 1811.06965): all forwards, then all backwards."""
    (chunk,) = chunks_of(placement, rank)
    yield from _forward([chunk], range(micro_batches))
    for micro_batch in range(micro_batches):
        yield Action(Kind.BACKWARD, chunk, micro_batch)


def one_forward_one_backward(placement: Placement, rank: int, micro_batches: int, group: int) -> Iterator[Action]:
    """1F1B (PipeDream-flush, arXiv 2006.09503): a warm-up of one forward for every later rank; then forwards and
    backwards alternate."""
    pipeline_ranks = max(placement) + 1
    (chunk,) = chunks_of(placement, rank)
    warm_up = min(pipeline_ranks - 1 - rank, micro_batches)
    yield from _forward([chunk], range(warm_up))
    for micro_batch in range(micro_batches):
        if micro_batch + warm_up < micro_batches:
            yield Action(Kind.FORWARD, chunk, micro_batch + warm_up)
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
        warm_up = total
    else:
        warm_up = min(total, 2 * (pipeline_ranks - 1 - rank) + (len(chunks) - 1) * pipeline_ranks)
    for index in range(warm_up):
        yield Action(Kind.FORWARD, *nth(index, chunks))
    for index in range(total):
        if index + warm_up < total:
            yield Action(Kind.FORWARD, *nth(index + warm_up, chunks))
        yield Action(Kind.BACKWARD, *nth(index, backward_chunks))


def zero_bubble_vee(placement: Placement, rank: int, micro_batches: int, group: int) -> Iterator[Action]:
    """ZBV (Qi et al., arXiv 2405.15362): each rank owns a chunk of the way there and one of the way back.

    After a warm-up, forward and backward of both chunks take turns, as in torch's ``ScheduleZBVZeroBubble``. If a
    forward and both parts of a backward are equally long, a rank waits only before its first and after its last
    compute, P - 1 forwards in all. It stores at most 2P inputs, as 1F1B does on the first rank if its chunks are cut
    in two.
    """
    there, back = chunks_of(placement, rank)
    following = max(placement) - rank
    forwards, backwards = ([(kind, chunk) for chunk in (there, back)] for kind in (Kind.FORWARD, Kind.BACKWARD))
    warm_up = [forwards[0]] * (2 * following + 1) + forwards[::-1] * rank
    warm_up += [forwards[1], backwards[1]] * (following + 1)
    steady = [forwards[0], backwards[0], forwards[1], backwards[1]] * micro_batches
    done: Counter[tuple[Kind, int]] = Counter()
    for compute in (*warm_up, *steady):
        if done[compute] < micro_batches:
            yield Action(*compute, done[compute])
            done[compute] += 1


def forward_only(placement: Placement, rank: int, micro_batches: int, group: int) -> Iterator[Action]:
    """Evaluation: all micro-batches pass through a chunk before the next chunk starts."""
    return _forward(chunks_of(placement, rank), range(micro_batches))


def by_calls(order: Order, placement: Placement, rank: int, micro_batches: int, group: int) -> Segments:
    """For a script that computes the loss: it calls the model on every pipeline rank, for one micro-batch each, and
    needs the outputs before its next call. So each call is a segment of forwards. The backwards of ``order`` follow the
    last call."""
    chunks, pipeline_ranks = chunks_of(placement, rank), max(placement) + 1
    calls = [list(_forward(chunks, members)) for members in micro_batch_groups(micro_batches, pipeline_ranks)]
    backwards = [action for action in order(placement, rank, micro_batches, group) if action.kind is Kind.BACKWARD]
    return [*calls, backwards]


def chunks_of(placement: Placement, rank: int) -> list[int]:
    """Returns the chunks on ``rank``, ascending."""
    return [chunk for chunk, owner in enumerate(placement) if owner == rank]


def first_turning_chunk(placement: Placement) -> int:
    """Returns the first chunk of the turn. No rank owns two chunks from there on.

    Micro-batches therefore come back to these chunks one by one.
    """
    owners: set[int] = set()
    for chunk in reversed(range(len(placement))):
        if placement[chunk] in owners:
            return chunk + 1
        owners.add(placement[chunk])
    return 0


def turns_at_once(schedule: str, micro_batches: int, pipeline_ranks: int) -> bool:
    """Whether each backward of the model's last chunk directly follows its forward, unless the script computes the
    loss in between.

    It does not where all forwards of a rank come first: under gpipe, and under interleaved 1F1B with one micro-batch
    for each rank.
    """
    all_forwards_first = schedule == "gpipe" or (schedule == "interleaved_1f1b" and micro_batches == pipeline_ranks)
    return micro_batches == 1 or not all_forwards_first


def _forward(chunks: list[int], micro_batches: range) -> Iterator[Action]:
    for chunk in chunks:
        for micro_batch in micro_batches:
            yield Action(Kind.FORWARD, chunk, micro_batch)


ORDERS: dict[str, Order] = {
    "layered": layered,
    "interleaved_1f1b": interleaved,
    "1f1b": one_forward_one_backward,
    "gpipe": gpipe,
    "zbv": zero_bubble_vee,
}
SCHEDULES = tuple(ORDERS)


def lowest_chunks(placement: Placement, share: float) -> tuple[int, ...]:
    """Returns the lowest chunks of every rank that stay on the device if the host is to hold at least the ``share``,
    from 0 to 1, of each rank's chunks.

    A step begins with the lowest chunks. Their updates on the host would be the only ones that nothing hides.
    """
    own = [chunks_of(placement, rank) for rank in range(max(placement) + 1)]
    return tuple(sorted(chunk for chunks in own for chunk in chunks[: len(chunks) - math.ceil(share * len(chunks))]))
