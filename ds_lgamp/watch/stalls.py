"""Notices that ranks stand still, and finds the rank to blame.

The lifeline's thread looks at its own rank every second. A rank that waits for long says so to the hub, over the
lifeline. The hub then asks all ranks where they stand. Those whose threads still run answer at once.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping

from ds_lgamp.watch.connections import Connection, Member
from ds_lgamp.watch.culprit import Silent, Stall, stalled_longest, without_hub
from ds_lgamp.watch.guard import Guard
from ds_lgamp.watch.last_words import say
from ds_lgamp.watch.standing import Standing
from ds_lgamp.watch.whereabouts import Observer, Whereabouts, asks_after

TICK = 1.0
"""Seconds between two looks at this rank."""
_STALLED, _WHERE, _STANDS = "stalled", "where", "stands"
ANSWER = 3.0
"""Seconds within which a rank answers if its threads run."""
_WARN_AFTER = 30.0
"""Seconds that a rank waits before it is worth a warning, or a quarter of the limit if that is less."""
_QUARTER = 4
_LONGEST_PAUSE = 5.0
"""Seconds between two rounds of questions, at most."""
_LONGEST_STEP = 5.0
"""Seconds between two looks at the clock, at most; a longer pause does not count."""


class AwakeClock:
    """Stands still while its process is suspended, by Slurm, a shell or a debugger. Somebody asks it every second.

    On waking, all that it would have waited for is yet to come: answers of other ranks, and the end of a stall.

    Args:
        clock: returns the time that goes on, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last, self._skipped = clock, clock(), 0.0

    def now(self) -> float:
        """Returns the time in seconds."""
        now = self._clock()
        if now - self._last > _LONGEST_STEP:
            self._skipped += now - self._last
        self._last = now
        return now - self._skipped


class Rounds:
    """The hub's questions: a round asks all ranks where they stand. The clock is the caller's."""

    def __init__(self) -> None:
        self._wanted = False
        self._begun: float | None = None
        """When the round that runs began."""
        self._next = 0.0
        self._asked: set[int] = set()
        self._answers: dict[int, Standing] = {}
        self._silent: dict[int, tuple[float, str]] = {}
        """By rank, since when it has not answered: by the caller's clock, and in words."""
        self._warnings = Warnings()

    def want(self) -> None:
        """Asks for a round: some rank waits."""
        self._wanted = True

    def is_due(self, now: float) -> bool:
        return self._wanted and self._begun is None and now >= self._next

    def begin(self, asked: Collection[int], now: float) -> None:
        """The caller has ``asked`` these ranks."""
        self._wanted, self._begun, self._asked, self._answers = False, now, set(asked), {}

    def hear(self, standing: Standing) -> None:
        """Takes an answer."""
        self._silent.pop(standing.rank, None)
        self._answers[standing.rank] = standing

    def is_complete(self, now: float) -> bool:
        """Whether all have answered, or had the time to."""
        if self._begun is None:
            return False
        return self._asked <= self._answers.keys() or now >= self._begun + ANSWER

    def judge(self, own: Standing, gone: Mapping[int, Silent], now: float) -> Stall | None:
        """Ends the round. Returns the stall to report, if there is one.

        Args:
            own: where this rank stands.
            gone: ranks that were not asked.
        """
        assert self._begun is not None, "a round runs"
        begun, self._begun = self._begun, None
        for rank in self._asked - self._answers.keys():
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - begun)))
            self._silent.setdefault(rank, (begun, since))
        self._silent = {rank: since for rank, since in self._silent.items() if rank in self._asked}
        standings = {**self._answers, own.rank: own}
        silent = {
            rank: Silent(f"does not answer since {text}", now - since) for rank, (since, text) in self._silent.items()
        }
        stall = stalled_longest(standings, {**gone, **silent})
        longest = max((standing.seconds for standing in standings.values() if standing.waits), default=0.0)
        pause = min(_LONGEST_PAUSE, own.limit / _QUARTER, max(1.0, longest / 10))
        self._next = now + pause
        return self._warnings.due(stall)


class Warnings:
    """Says when a stall is worth a line: once when it is long, and each time it has doubled."""

    def __init__(self) -> None:
        self._last = 0.0

    def due(self, stall: Stall | None) -> Stall | None:
        """Returns ``stall`` if it is worth a warning, or if it is over."""
        if stall is None or stall.seconds < self._last:
            self._last = 0.0
        if stall is None or stall.is_over:
            return stall
        if stall.seconds < max(min(_WARN_AFTER, stall.limit / _QUARTER), 2 * self._last):
            return None
        self._last = stall.seconds
        return stall


class Asking:
    """The questions of a rank that is not the hub."""

    def __init__(self) -> None:
        self._since: float | None = None
        """When it called the hub and had no answer yet."""
        self._warnings = Warnings()

    def hear(self) -> None:
        """The hub asks, so it lives."""
        self._since = None

    def stalls(self, own: Standing, hub: int, now: float) -> Stall | None:
        """The caller tells the hub that this rank waits. Returns the stall to report if the hub does not react."""
        if self._since is None:
            self._since = now
        silent = now - self._since
        if silent < ANSWER + _LONGEST_PAUSE:
            return None
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - silent))
        return self._warnings.due(without_hub(own, hub, Silent(f"does not answer since {since}", silent)))


def stalls(standing: Standing) -> bool:
    """Whether a rank waits for so long that it asks."""
    return bool(standing.waits) and standing.seconds >= asks_after(standing.limit)


class StallTalk:
    """Looks at this rank every second. Talks with other ranks only while one waits for long.

    Args:
        end: ends the job with a sentence, and this process with it; prints the calls that belong to it.
    """

    def __init__(self, own: Member, world: int, whereabouts: Whereabouts, end: Callable[[str, str], None]) -> None:
        self._own, self._world, self._whereabouts, self._end = own, world, whereabouts, end
        self._clock = AwakeClock()
        self._observer = Observer(own.rank, whereabouts)
        self._rounds, self._asking = Rounds(), Asking()
        self._left: dict[int, tuple[float, str]] = {}
        """By rank, when it said goodbye: by the clock, and in words."""
        self._failing = ""
        """Which rank fails, but completes a checkpoint first; "" if none does."""
        self._guard = Guard(own.name)

    def begin(self) -> None:
        """Starts the guard, which hears from :meth:`look` that this process runs."""
        self._guard.begin()
        self._whereabouts.on_new_limit = self._arm

    def look(self, neighbours: Mapping[Connection, Member], hub: Connection | None) -> BaseException | None:
        """Looks at this rank, and does what is due. Returns the error that the script handles where it stands still.

        Args:
            neighbours: the ranks at the other ends of connections.
            hub: the connection to the hub; None if this rank is the hub.
        """
        # First, because what follows could fail, and the guard would end this process if it heard no more of it.
        self._arm(self._whereabouts.limit)
        now = self._clock.now()
        own = self._observer.look(now)
        if hub is not None:
            self._call(own, hub, neighbours[hub].rank, now)
        else:
            self._ask(own, neighbours, now)
        return self._observer.error(own)

    def hear(self, kind: str, content: str, neighbour: Connection) -> None:
        """Takes what a neighbour says, if it is about standing still."""
        if kind == _WHERE:
            self._asking.hear()
            neighbour.send(f"{_STANDS} {self._observer.look(self._clock.now(), closely=True).to_line()}")
        elif kind == _STALLED:
            self._rounds.want()
        elif kind == _STANDS:
            self._rounds.hear(Standing.from_line(content))

    def hear_of_failure(self, sentence: str) -> None:
        """Takes why other ranks will wait for a while: one fails. With "", it goes on nevertheless."""
        self._failing = sentence and (self._failing or sentence)

    def hear_goodbye(self, member: Member) -> None:
        self._left[member.rank] = self._clock.now(), time.strftime("%H:%M:%S")

    def departed(self) -> str:
        """Returns which rank left first, and when; "" if this rank knows of none."""
        return next((f"rank {rank} {self._farewell(rank)}" for rank in self._left), "")

    def finish(self) -> None:
        """Judges nobody any more."""
        self._whereabouts.on_new_limit = lambda _: None
        self._guard.disarm()

    def let_go(self) -> None:
        """Closes what this process has of the connection to its guard. A forked process must not keep it open."""
        self._guard.let_go()

    def _arm(self, limit: float) -> None:
        self._guard.arm(limit, time.monotonic())

    def _call(self, own: Standing, hub: Connection, rank: int, now: float) -> None:
        """Lets the hub know that this rank waits."""
        if not stalls(own):
            self._asking.hear()
            return
        hub.send(_STALLED)
        self._report(self._asking.stalls(own, rank, now))

    def _ask(self, own: Standing, neighbours: Mapping[Connection, Member], now: float) -> None:
        """Runs the rounds of questions."""
        if stalls(own):
            self._rounds.want()
        if self._rounds.is_due(now):
            for neighbour in neighbours:
                neighbour.send(_WHERE)
            self._rounds.begin({member.rank for member in neighbours.values()}, now)
        if self._rounds.is_complete(now):
            there = {self._own.rank, *(member.rank for member in neighbours.values())}
            gone = {rank: self._gone(rank, now) for rank in range(self._world) if rank not in there}
            self._report(self._rounds.judge(self._observer.look(now, closely=True), gone, now))

    def _gone(self, rank: int, now: float) -> Silent:
        if rank not in self._left:
            return Silent("has no lifeline, so nothing is known about it", math.inf)
        return Silent(self._farewell(rank), now - self._left[rank][0])

    def _farewell(self, rank: int) -> str:
        return f"left at {self._left[rank][1]}: its script or its default process group ended"

    def _report(self, stall: Stall | None) -> None:
        """Ends the job because of ``stall`` if that is over, and warns of it otherwise."""
        if stall is None:
            return
        sentence = self._failing or stall.sentence
        if stall.is_over:
            self._end(sentence, "" if self._failing else stall.stack)
        elif stall.progress:
            say(f"ds_lgamp: {stall.progress}\n")
        else:
            left = stall.limit - stall.seconds
            ends = f"; if that lasts, the job ends in {left:.0f} s" if math.isfinite(left) else ""
            say(f"ds_lgamp: {sentence}{ends}\n")
