"""Notices that ranks stand still, and finds the rank to blame: the part of the lifeline that has no sockets.

A rank that waits for long says so to the hub. The hub then asks all ranks where they stand. Those whose threads still
run answer at once.
"""

import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from ds_lgamp.runtime.whereabouts import asks_after
from ds_lgamp.schedule.culprit import Silent, Stall, stalled_longest, without_hub
from ds_lgamp.schedule.standing import Standing

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

    On waking, all that it would have waited for is yet to come: answers of others, and the end of a stall.

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


class Said(NamedTuple):
    """What to tell about a stall."""

    stall: Stall
    is_over: bool
    """Whether the limit is reached, so that the job ends. Otherwise this is a warning."""


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

    def judge(self, own: Standing, gone: Mapping[int, Silent], now: float) -> Said | None:
        """Ends the round. Returns what to tell, if anything.

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
        return self._warnings.said(stall)


class Warnings:
    """Says when a stall is worth a warning: once when it is long, and each time it has doubled."""

    def __init__(self) -> None:
        self._last = 0.0

    def said(self, stall: Stall | None) -> Said | None:
        if stall is None or stall.seconds < self._last:
            self._last = 0.0
        if stall is None:
            return None
        if stall.seconds >= stall.limit:
            return Said(stall, True)
        if stall.seconds < max(min(_WARN_AFTER, stall.limit / _QUARTER), 2 * self._last):
            return None
        self._last = stall.seconds
        return Said(stall, False)


class Asking:
    """The questions of a rank that is not the hub."""

    def __init__(self) -> None:
        self._since: float | None = None
        """When it called the hub and had no answer yet."""
        self._warnings = Warnings()

    def hear(self) -> None:
        """The hub asks, so it lives."""
        self._since = None

    def stalls(self, own: Standing, hub: int, now: float) -> Said | None:
        """The caller tells the hub that this rank waits. Returns what to tell itself if the hub does not react."""
        if self._since is None:
            self._since = now
        silent = now - self._since
        if silent < ANSWER + _LONGEST_PAUSE:
            return None
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - silent))
        return self._warnings.said(without_hub(own, hub, Silent(f"does not answer since {since}", silent)))


def stalls(standing: Standing) -> bool:
    """Whether a rank waits for so long that it asks."""
    return bool(standing.waits) and standing.seconds >= asks_after(standing.limit)
