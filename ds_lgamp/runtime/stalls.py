"""Lets ranks tell each other over the lifeline where they stand."""

import logging
import math
import time
from collections.abc import Callable, Mapping

from ds_lgamp.runtime.last_resort import LastResort
from ds_lgamp.runtime.neighbours import Connection, Member
from ds_lgamp.runtime.watch import Asking, AwakeClock, Rounds, Said, stalls
from ds_lgamp.runtime.whereabouts import Observer, here
from ds_lgamp.schedule.culprit import Silent
from ds_lgamp.schedule.standing import Standing

logger = logging.getLogger(__name__)
TICK = 1.0
"""Seconds between two looks at this rank."""
_STALLED, _WHERE, _STANDS = "stalled", "where", "stands"


class StallTalk:
    """Looks at this rank every second. Talks with others only while some rank waits for long.

    Args:
        own: this rank.
        world: the number of ranks.
        say: prints a warning.
        end: ends the job with a sentence, and this process with it; prints the calls that belong to it.
    """

    def __init__(self, own: Member, world: int, say: Callable[[str], None], end: Callable[[str, str], None]) -> None:
        self._own, self._world, self._say, self._end = own, world, say, end
        self._clock = AwakeClock()
        self._observer = Observer(own.rank, own.host)
        self._rounds, self._asking = Rounds(), Asking()
        self._left: dict[int, tuple[float, str]] = {}
        """By rank, when it said goodbye: by the clock, and in words."""
        self._failing = ""
        """Which rank fails, but completes a checkpoint first; "" if none does."""
        self._last_resort = LastResort(own.name)

    def begin(self) -> None:
        """From now on the guard of the last resort runs, and :meth:`look` tells it that this process runs."""
        self._last_resort.begin()
        here.on_new_limit = self._arm

    def look(self, neighbours: Mapping[Connection, Member], hub: Connection | None) -> BaseException | None:
        """Looks at this rank, and does what is due. Returns the error that the script handles where it stands still.

        Args:
            neighbours: the ranks at the other ends of connections.
            hub: the connection to the hub; None if this rank is the hub.
        """
        # First, because what follows could fail, and the guard would end this process if it heard no more of it.
        self._arm(here.limit)
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

    def note_failing(self, sentence: str) -> None:
        """Takes why others will wait for a while: a rank fails. With "", it goes on nevertheless."""
        self._failing = sentence and (self._failing or sentence)

    def note_goodbye(self, member: Member) -> None:
        self._left[member.rank] = self._clock.now(), time.strftime("%H:%M:%S")

    def departed(self) -> str:
        """Returns which rank left first, and when; "" if this rank knows of none."""
        return next((f"rank {rank} {self._farewell(rank)}" for rank in self._left), "")

    def finish(self) -> None:
        """Judges nobody any more."""
        here.on_new_limit = None
        self._last_resort.disarm()

    def let_go(self) -> None:
        """Closes what this process has of the connection to its guard. A forked process must not keep it open."""
        self._last_resort.let_go()

    def _arm(self, limit: float) -> None:
        self._last_resort.arm(limit, time.monotonic())

    def _call(self, own: Standing, hub: Connection, rank: int, now: float) -> None:
        """Lets the hub know that this rank waits."""
        if not stalls(own):
            self._asking.hear()
            return
        hub.send(_STALLED)
        self._tell(self._asking.stalls(own, rank, now))

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
            self._tell(self._rounds.judge(self._observer.look(now, closely=True), gone, now))

    def _gone(self, rank: int, now: float) -> Silent:
        if rank not in self._left:
            return Silent("has no lifeline, so nothing is known about it", math.inf)
        return Silent(self._farewell(rank), now - self._left[rank][0])

    def _farewell(self, rank: int) -> str:
        return f"left at {self._left[rank][1]}: its script or its default process group ended"

    def _tell(self, said: Said | None) -> None:
        if said is None:
            return
        sentence = self._failing or said.stall.sentence
        if said.is_over:
            self._end(sentence, "" if self._failing else said.stall.stack)
        else:
            left = said.stall.limit - said.stall.seconds
            ends = f"; if that lasts, the job ends in {left:.0f} s" if math.isfinite(left) else ""
            self._say(f"ds_lgamp: {sentence}{ends}\n")
