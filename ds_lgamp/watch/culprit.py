"""Finds the rank that holds up the job, from the action of every rank and what each waits for.

The search begins at a rank that waits. It follows each wait to the ranks that have not yet done what it waits for,
until it comes to one that does not answer, or that waits for nobody. If all of them have done it, the network between
them is to blame.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from ds_lgamp.watch.standing import Standing, Wait, listed, placed

_SHOWN = 5
"""How many ranks of a chain a sentence names."""
_TRIED = 8
"""From how many waiting ranks to search."""


class Cause(IntEnum):
    """Why a search ends at a rank. Smaller causes come first; of ranks with the same cause, the first one found is the
    culprit."""

    SILENCE = 0
    """It does not answer."""
    WORK = 1
    """It answers, and waits for nobody."""
    NETWORK = 2
    """What it waits for was done."""
    CIRCLE = 3
    """Ranks wait for each other."""


class Silent(NamedTuple):
    """A rank of which nothing is known."""

    text: str
    """Follows the rank: "does not answer since 12:03:05"."""
    seconds: float
    """For how long it has been silent."""


class Stall(NamedTuple):
    """Why a rank waits."""

    cause: Cause
    culprits: tuple[int, ...]
    """One rank; two or more if the network between them is to blame, or if they wait for each other."""
    seconds: float
    """For how long nobody between the rank and the culprit has done anything."""
    limit: float
    """How many seconds are too many."""
    is_judged: bool
    """Whether it ends the job if it lasts: the rank waits in a batch, or for ranks that can never go on."""
    sentence: str
    stack: str
    """The calls of the main thread of a culprit that waits for nobody, or of ranks outside of batches in a circle."""
    progress: str = ""
    """What a culprit does that compiles, as a sentence: nothing is wrong yet. "" for all others."""

    @property
    def is_over(self) -> bool:
        """Whether the limit is reached, so that the job ends."""
        return self.seconds >= self.limit


def find(victim: Standing, standings: Mapping[int, Standing], silent: Mapping[int, Silent]) -> Stall:
    """Finds what ``victim`` waits for. Each rank is either among ``standings``, because it answers, or ``silent``."""
    search = _Search(victim, standings, silent)
    cause, rank, blamed = search.run()
    path = search.path(rank)
    known = [standings[each] for each in path if each in standings]
    involved = known + [standings[each] for each in blamed if each in standings]
    times = [standing.seconds for standing in involved] + [silent[each].seconds for each in path if each in silent]
    is_deadlock = cause is Cause.CIRCLE and search.is_deadlock(blamed)
    shown = search.rarest(blamed) if is_deadlock else [each for each in blamed if not standings[each].inside]
    stacks = [f"  rank {each}:\n{standings[each].stack}" for each in shown] if cause is Cause.CIRCLE else []
    return Stall(
        cause,
        (rank,) if cause <= Cause.WORK else (rank, *(each for each in blamed if each != rank)),
        min(times),
        max(standing.limit for standing in known),
        victim.inside or is_deadlock,
        "; ".join(_clauses(search, path, cause, blamed)),
        standings[rank].stack if cause is Cause.WORK else "".join(stacks),
        _described(standings[rank], None) if cause is Cause.WORK and standings[rank].compiles else "",
    )


def stalled_longest(standings: Mapping[int, Standing], silent: Mapping[int, Silent]) -> Stall | None:
    """Returns the stall that has lasted longest, of the ranks that have waited longest; None if no rank
    waits, or if all that do may wait: outside of batches, for ranks that may go on."""
    waiting = sorted((each for each in standings.values() if each.waits), key=lambda each: -each.seconds)
    stalls = [find(victim, standings, silent) for victim in waiting[:_TRIED]]
    judged = [stall for stall in stalls if stall.is_judged or stall.cause is Cause.SILENCE]
    return max(judged, key=lambda stall: (stall.seconds, -stall.cause), default=None)


def without_hub(own: Standing, hub: int, silence: Silent) -> Stall:
    """The stall of a rank that cannot ask about other ranks, because ``hub`` does not answer."""
    sentence = f"{_beginning(own)}; rank {hub}, which would know why, {silence.text}"
    return Stall(Cause.SILENCE, (hub,), min(own.seconds, silence.seconds), own.limit, own.inside, sentence, "")


class _Search:
    """A search in breadth, from rank to rank."""

    def __init__(self, victim: Standing, standings: Mapping[int, Standing], silent: Mapping[int, Silent]) -> None:
        self.victim, self.standings, self.silent = victim, standings, silent
        self.sources: dict[int, tuple[int, Wait] | None] = {victim.rank: None}
        """By rank, who waits for it and how."""
        self.first_late: dict[int, int] = {}
        """By rank, whom it waits for first of all."""

    def run(self) -> tuple[Cause, int, Sequence[int]]:
        """Returns where the search ends and why; for the network and for circles, with the ranks at the other end."""
        ends: list[tuple[Cause, int, Sequence[int]]] = []
        queue = deque([self.victim.rank])
        while queue:
            rank = queue.popleft()
            if rank in self.silent:
                return Cause.SILENCE, rank, ()
            standing = self.standings[rank]
            if not standing.waits:
                ends.append((Cause.WORK, rank, ()))
                continue
            late = {other: wait for wait in standing.waits for other in self.late(standing, wait)}
            if not late:
                ends.append((Cause.NETWORK, rank, self.involved(standing)))
            for other, wait in late.items():
                self.first_late.setdefault(rank, other)
                if other not in self.sources:
                    self.sources[other] = rank, wait
                    queue.append(other)
                elif other in self.path(rank):
                    ends.append((Cause.CIRCLE, rank, self.path(rank)[self.path(rank).index(other) :]))
        return min(ends, key=lambda end: end[0]) if ends else (Cause.CIRCLE, *self.circle())

    def circle(self) -> tuple[int, Sequence[int]]:
        """Returns a rank of the circle to which the first waits lead from the victim, and all of it."""
        ranks = [self.victim.rank]
        while (following := self.first_late[ranks[-1]]) not in ranks:
            ranks.append(following)
        return following, ranks[ranks.index(following) :]

    def late(self, standing: Standing, wait: Wait) -> list[int]:
        """Returns the ranks that have not done yet what ``wait`` waits for. Those that have done least come first."""
        ranks = wait.ranks or (*self.standings, *self.silent)
        late = [
            rank
            for rank in ranks
            if rank != standing.rank and (rank in self.silent or self.is_late(self.standings[rank], standing, wait))
        ]
        return sorted(late, key=lambda rank: self.progress(rank))

    def is_late(self, other: Standing, standing: Standing, wait: Wait) -> bool:
        if wait.is_call:
            same = any(each.is_call and each.what == wait.what and each.ranks == wait.ranks for each in other.waits)
            # Between batches each rank may make any call, and a rank that has entered this one is not waited for.
            always = wait.blocks and not standing.inside
            return not same and (always or _reached(other) <= _reached(standing))
        if wait.times == 0:
            # It was launched in the batch before, which every rank outside of a batch has left.
            return other.batch < standing.batch and other.inside
        return (other.batch, other.done.get(wait.what, 0)) < (standing.batch, wait.times)

    def is_deadlock(self, circle: Sequence[int]) -> bool:
        """Whether the ranks of ``circle`` are in calls that nobody leaves before all have entered."""
        return all(wait.blocks for rank in circle for wait in self.standings[rank].waits)

    def rarest(self, circle: Sequence[int]) -> list[int]:
        """Returns the ranks of ``circle`` whose call has the fewest callers."""
        calls = {rank: (wait.what, wait.ranks) for rank in circle for wait in self.standings[rank].waits}
        callers = Counter((wait.what, wait.ranks) for each in self.standings.values() for wait in each.waits)
        return [rank for rank, call in calls.items() if callers[call] == min(callers[each] for each in calls.values())]

    def progress(self, rank: int) -> tuple[int, int]:
        standing = self.standings.get(rank)
        return (-1, -1) if standing is None else (standing.batch, standing.row)

    def involved(self, standing: Standing) -> Sequence[int]:
        return sorted({rank for wait in standing.waits for rank in wait.ranks or self.standings})

    def path(self, rank: int) -> list[int]:
        """Returns the ranks from the victim to ``rank``."""
        ranks = [rank]
        while (source := self.sources[ranks[-1]]) is not None:
            ranks.append(source[0])
        return ranks[::-1]


def _reached(standing: Standing) -> tuple[int, bool, int]:
    """Returns how far a rank has come, to compare ranks. Outside of a batch it has done all of the last one."""
    return standing.batch, not standing.inside, standing.row if standing.inside else 0


def _clauses(search: _Search, path: Sequence[int], cause: Cause, blamed: Sequence[int]) -> Iterable[str]:
    """Returns the parts of the sentence: each rank of ``path`` and what it waits for, then the culprit."""
    shown = path if len(path) <= _SHOWN else [*path[:2], *path[-(_SHOWN - 2) :]]
    for place, rank in enumerate(shown):
        if rank in search.silent:
            yield f"rank {rank} {search.silent[rank].text}"
        elif place == 0:
            yield _beginning(search.victim)
        else:
            yield _described(search.standings[rank], search.victim)
        if len(shown) < len(path) and place == 1:
            yield f"{len(path) - len(shown)} more ranks wait between them"
    end = path[-1]
    others = [each for each in blamed if each != end]
    if cause is Cause.NETWORK and len(others) == 1:
        yield f"rank {others[0]} has done its part, so the link between ranks {others[0]} and {end} is down"
    elif cause is Cause.NETWORK:
        yield f"all of them take part, so the network or a device between ranks {listed(blamed)} is down"
    elif cause is Cause.CIRCLE:
        yield f"so ranks {listed(blamed)} wait for each other"


def _beginning(victim: Standing) -> str:
    awaited = " and for ".join(wait.text for wait in victim.waits)
    return f"rank {victim.rank} has waited {victim.seconds:.0f} s {_place(victim)} for {awaited}"


def _described(standing: Standing, victim: Standing | None) -> str:
    same_batch = victim is not None and standing.inside and standing.batch == victim.batch
    place = standing.place if same_batch else _place(standing)
    text = f"rank {standing.rank} stands {place}"
    if standing.waits:
        return f"{text}, waiting for {' and for '.join(wait.text for wait in standing.waits)}"
    if standing.compiles:
        return f"rank {standing.rank} compiles {place}, for {standing.seconds:.0f} s"
    return f"{text} for {standing.seconds:.0f} s and waits for no rank"


def _place(standing: Standing) -> str:
    return placed(standing.place, standing.inside, standing.label)
