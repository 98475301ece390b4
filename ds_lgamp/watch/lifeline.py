"""The connections of a rank to other ranks, and the thread that waits for them to end.

gloo notices a dead rank, because its connections end. Kernels of NCCL wait for it for ever, and so does their host.
Therefore every rank holds a connection to rank 0, the hub, and a thread waits for connections to end. Where one ends
without a goodbye, its rank is dead. The hub tells all other ranks which one it was, so they end after two hops, in a
job of any size. When the hub itself dies, all ranks see it. A hub that leaves well hands its connections over to the
lowest rank that is left. Every second, the thread also looks whether its rank stands still
(:mod:`ds_lgamp.watch.stalls`), and otherwise it sleeps until something happens.

The thread needs the interpreter. Waits of torch, gloo and NCCL give it away. Where the main thread keeps it for ever, a
guard ends the process (:mod:`ds_lgamp.watch.guard`). A rank that gets SIGTERM first says so
(:mod:`ds_lgamp.watch.launcher`).
"""

import json
import logging
import math
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from ds_lgamp.watch.connections import HERE, PATIENCE, RETRY, Connection, Member, Neighbours, complete, flush
from ds_lgamp.watch.last_words import Exit, cause, say
from ds_lgamp.watch.launcher import NEWS, Launcher, Termination
from ds_lgamp.watch.stalls import TICK, StallTalk
from ds_lgamp.watch.whereabouts import Whereabouts

logger = logging.getLogger(__name__)
_GRACE = 3.0
"""Seconds that a rank has to fail by itself after another died, with an error that says more."""
_NEWS = 0.5
"""Seconds to wait, at an error, for the news that it follows from another rank's end."""
_STAY = 2.0
"""Seconds that a hub waits for other ranks to leave too, before it hands its connections over."""
_FAREWELL = 1.0
"""Seconds to wait for other ranks to see a goodbye."""
_HEIRS = 16
"""How many ranks a hub that leaves names, in case the first ones leave too."""
_BACKLOG = 0.1
"""Seconds to hear of what happened before SIGTERM came."""
_GOODBYE, _FAILS, _TERMINATED, _VERDICT, _REFUSAL = "goodbye fails terminated verdict refusal".split()


class Process(NamedTuple):
    """The process of a rank, as far as its lifeline is concerned."""

    launcher: Launcher
    whereabouts: Whereabouts
    exit: Exit


class Lifeline:
    """The connections of this rank, and the thread that watches them.

    Args:
        listener: takes the connections of other ranks.
        token: what a rank must present.
    """

    def __init__(self, own: Member, listener: socket.socket, token: str, world: int, process: Process) -> None:
        self._own, self._process = own, process
        self._self = f"this rank, {own.rank} on {own.host}"
        self._neighbours = Neighbours(own, listener, token, self._hear)
        self._leaving = self._neighbours.leaving
        self.stalls = StallTalk(own, world, process.whereabouts, self._stalled)
        self._shown: int | None = None
        """The identity of the error that the script handles where it stands still."""
        self.a_rank_fails = False
        """Whether a rank fails, but completes a checkpoint first."""
        self._verdict: str | None = None
        self._announces, self._announced = False, ""
        """Whether a goodbye of this rank takes its failure back; and which other rank fails, "" if none."""
        self._judged = threading.Event()
        self._blamed, self._waited = threading.Event(), False
        """Whether another rank is known to be the reason if this one fails; whether this one has waited for that."""
        self._said, self._speaking = False, threading.Lock()
        self._termination, self._terminated = Termination(), False
        self._alarm, self._bell = socket.socketpair()
        self._neighbours.on_input(self._bell, lambda bell: bell.recv(1))
        self._neighbours.on_input(self._termination, self._terminate)
        self._thread = threading.Thread(target=self._watch, name="ds_lgamp lifeline", daemon=True)

    def start(self, hub: Member | None) -> None:
        """Begins to watch. Raises OSError if the ``hub`` cannot be reached. The hub itself has none."""
        if hub is not None:
            self._neighbours.join(hub)
        self.stalls.begin()
        self._thread.start()
        self._termination.catch()

    def leave(self) -> None:
        """Says goodbye. From now on, the end of this rank ends no other rank, and the end of none ends this one."""
        if self._announces:
            # It has caught the error.
            self._hear_of_failure("")
        self._termination.release()
        self._leaving.set()
        with suppress(OSError):
            self._alarm.send(b"!")
        self._thread.join(_STAY + _FAREWELL + PATIENCE)

    def fail(self, cause: str, refused: bool = False) -> str:
        """Tells the other ranks why this rank is about to end, unless another rank's end is known to be the reason.

        Args:
            refused: whether the other ranks are about to refuse the same, and know why.

        Returns the sentence that names the other rank, or one that left before; "" if there is none, or if it was said
        already.
        """
        words = self.news()
        if self._judged.is_set():
            return words
        own = f"{self._own.name} failed ({cause})"
        if refused:
            self._spread(_REFUSAL, own)
        else:
            self._spread(_VERDICT, self._announced or own)
        return words or (self._sentence() if self.stalls.departed() and not self._said else "")

    def news(self) -> str:
        """Waits for a moment for the news that an error of this rank follows from another rank's end. Returns the
        sentence that names the other rank; "" if there is none, or if it was said already."""
        if not self._blamed.wait(0 if self._waited else _NEWS):
            self._waited = True
            return ""
        return self._last_words()

    def announce(self, cause: str, meanwhile: str = "", exits: bool = False) -> None:
        """Tells the other ranks that this one fails, because of ``cause``, but takes its time.

        Args:
            meanwhile: what it does first, in words that follow.
            exits: whether the script leaves by ``sys.exit``, which it may catch unseen. A goodbye takes nothing back.
        """
        self._announces = not exits
        self._hear_of_failure(f"{self._own.name} failed ({cause}){meanwhile}")

    def let_go(self) -> None:
        """Closes what this process has of the connections. A forked process must not keep them open."""
        for left in (self._neighbours, self._alarm, self._bell):
            left.close()
        self.stalls.let_go()
        self._termination.close()

    # What the thread does

    def _watch(self) -> None:
        try:
            try:
                self._serve(self._leaving.is_set, looks=True)
            finally:
                # The guard would end this process if it heard no more of it.
                self.stalls.finish()
            self._serve(lambda: len(self._neighbours.members) < 2, _STAY)
        finally:
            self._say_goodbye()
            self._serve(lambda: not self._neighbours.members, _FAREWELL)
            self.let_go()

    def _serve(self, over: Callable[[], bool], seconds: float = math.inf, looks: bool = False) -> None:
        """Answers what happens until ``over``, for ``seconds`` at most. ``looks`` whether this rank stands still."""
        deadline, next_look = time.monotonic() + seconds, time.monotonic()
        while not over():
            now = time.monotonic()
            if now >= deadline:
                return
            if looks and now >= next_look:
                self._look()
                next_look = now + TICK
            left = min(deadline, next_look if looks else math.inf) - now
            if flush(self._neighbours.members):
                left = min(left, RETRY)
            for key, _ in self._neighbours.selector.select(max(0.0, left)):
                # An earlier event may have closed the connection of this one.
                if key.fd == key.fileobj.fileno():  # type: ignore[union-attr]
                    key.data(key.fileobj)

    def _look(self) -> None:
        if self._process.launcher.is_gone():
            self._judge(f"{self._own.name} lost its {self._process.launcher}, which was killed or has ended", None)
        try:
            self._show(self.stalls.look(self._neighbours.members, self._neighbours.hub))
        except Exception:
            # An error there must not stop the watch for deaths.
            logger.exception(f"ds_lgamp: {self._own.name} cannot tell whether ranks stand still")

    def _show(self, error: BaseException | None) -> None:
        """Shows and announces the ``error`` that the script handles where it stands still, as in a ``finally`` that
        waits for other ranks. It may never come to the place that shows it. Takes that back if the script goes on."""
        identity = None if error is None else id(error)
        if identity == self._shown or self._process.exit.failing:
            return
        if error is None:
            self._hear_of_failure("")
        else:
            reason = self._last_words() if self._blamed.is_set() else ""
            trace = "".join(traceback.format_exception(error))
            say(f"{reason}{trace}ds_lgamp: {self._own.name} handles this error, and stands still there\n")
            self.announce(cause(error), " and stands still while it handles that")
        # Of the error itself, this thread would keep all that its calls hold.
        self._shown = identity

    def _hear(self, neighbour: Connection) -> None:
        lines, ended = neighbour.receive()
        for line in lines:
            kind, _, content = line.partition(" ")
            if kind == HERE:
                self._neighbours.watched.add(neighbour)
            elif kind in (_VERDICT, _REFUSAL):
                self._judge(content, neighbour, kind)
            elif kind == _TERMINATED:
                self._neighbours.ending.add(neighbour)
            elif kind == _FAILS:
                self._hear_of_failure(content, neighbour)
            elif kind == _GOODBYE:
                self.stalls.hear_goodbye(self._neighbours.members[neighbour])
                self._neighbours.drop(neighbour)
                self._neighbours.join_first(Member(*heir) for heir in json.loads(content))
                return
            else:
                self.stalls.hear(kind, content, neighbour)
        if ended:
            member = self._neighbours.members[neighbour]
            # What terminates this rank, too, is to blame rather than a neighbour that it ends first.
            ends = self._terminated and neighbour in self._neighbours.ending
            died = neighbour in self._neighbours.watched and not ends
            self._neighbours.drop(neighbour)
            if died:
                self._judge(f"{member.name} died", neighbour)

    def _say_goodbye(self) -> None:
        members = self._neighbours.members
        heirs = sorted(members.values())[:_HEIRS]
        for neighbour in list(members):
            neighbour.send(f"{_GOODBYE} {json.dumps(heirs)}")
        complete(members, _FAREWELL)
        for neighbour in members:
            neighbour.finish()
        self._neighbours.watched.clear()

    # The end

    def _stalled(self, verdict: str, stack: str) -> None:
        """Ends the job, because a rank stands still."""
        if stack:
            say(f"ds_lgamp: the last calls of the ranks that stand still:\n{stack}")
        self._judge(verdict, None)

    def _judge(self, verdict: str, source: Connection | None, kind: str = _VERDICT) -> None:
        """Passes the first ``verdict`` on, and ends this rank soon, unless it leaves. Says so at once, because a
        launcher may be faster; a rank that is about to refuse the same has a moment to do so itself."""
        if self._verdict is not None:
            return
        self._verdict = verdict
        if source is not None:
            self._neighbours.watched.discard(source)
        self._spread(kind, verdict)
        # A rank that refuses says so itself, unless SIGTERM is about to end it.
        if (kind == _VERDICT or self._terminated) and not self._leaving.is_set():
            say(self._last_words())
        self._judged.set()
        self._blamed.set()
        # Nothing is left to say before SIGTERM ends this rank.
        self._termination.release()
        if not self._leaving.wait(_GRACE):
            self._process.exit.end(self._last_words(), self._own.rank)

    def _hear_of_failure(self, sentence: str, source: Connection | None = None) -> None:
        """Passes on that a rank fails. Waits for it then have a reason, and checkpoints are written in haste. With "",
        it goes on nevertheless."""
        self.stalls.hear_of_failure(sentence)
        self.a_rank_fails = bool(sentence)
        if source is not None:
            self._announced = sentence and (self._announced or sentence)
            if sentence or self._judged.is_set():
                self._blamed.set()
            else:
                self._blamed.clear()
                self._said = False
        self._neighbours.tell(f"{_FAILS} {sentence}", source)

    def _terminate(self, termination: Termination) -> None:
        """Ends this rank, because SIGTERM has come. A verdict that comes within a moment says why, and this rank
        passes it on."""
        if not termination.has_come():
            return
        self._neighbours.selector.unregister(termination)
        self._neighbours.tell(_TERMINATED)
        # A neighbour that ended before is to blame, even if SIGTERM has ended it.
        self._serve(lambda: False, _BACKLOG)
        self._terminated = True
        self._serve(lambda: False, NEWS)
        say(f"ds_lgamp: {self._self}, was terminated (SIGTERM) {self._process.whereabouts}\n")
        termination.end()

    def _spread(self, kind: str, verdict: str) -> None:
        neighbours = list(self._neighbours.watched)
        self._neighbours.tell(f"{kind} {verdict}")
        # Neighbours that know the verdict end too, without a goodbye.
        self._neighbours.watched.clear()
        complete(neighbours, _FAREWELL)

    def _last_words(self) -> str:
        """Returns the sentence with which this rank ends; "" from the second time on."""
        with self._speaking:
            said, self._said = self._said, True
        return "" if said else self._sentence()

    def _sentence(self) -> str:
        reasons = filter(None, (self._verdict or self._announced, self.stalls.departed()))
        return f"ds_lgamp: {'; '.join(reasons)}; {self._self}, ends {self._process.whereabouts}\n"
