"""Where the main thread of this rank is.

It writes plain attributes, here and in the executor, and a step has no extra work. What they mean is read off the
program only once the rank has stood still for a while, or once somebody asks.
"""

import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from linecache import getline
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from ds_lgamp.schedule.actions import Action
from ds_lgamp.watch.last_words import in_flight_of
from ds_lgamp.watch.standing import Neighbours, Standing, Wait, done_before, listed, placed, waits_in

FIRST_BATCH, _LONGEST_FIRST_BATCH = 10, 1200.0
"""How many times as long an engine may take in its first training batch and its first evaluation, and wherever torch
compiles; but no more than so many seconds, unless the limit itself is longer."""


def _longer(limit: float) -> float:
    return max(limit, min(limit * FIRST_BATCH, _LONGEST_FIRST_BATCH))


_EARLY, _ASKED_AFTER = 8, 5.0
"""A rank that waits asks about all ranks after 5 seconds, or an 8th of the limit if that is less."""
_MEETINGS = ("barrier", "monitored_barrier", "all_", "_all_gather", "reduce_scatter", "_reduce_scatter")
"""Prefixes of the functions of torch.distributed that no rank can leave before all of the group have entered."""
_FRAMES = 12
"""How many calls of a stack to show, the innermost ones."""


class Place(Enum):
    """What runs on the main thread. Its text follows "stands"."""

    SCRIPT = "outside of a batch"
    DATA = "where it reads the data"
    BATCH = "between actions"


class Running(Protocol):
    """The executor, as far as it says where it is."""

    program: Sequence[Action]
    row: int
    doing: str
    current: Action | None
    neighbours: Neighbours
    begun: set[bool]


class Whereabouts:
    """Where the main thread is. It writes, and only :class:`Observer` reads."""

    def __init__(self) -> None:
        self.batch = 0
        """How many batches this process has begun, whatever the engine."""
        self.label = ""
        self.place = Place.SCRIPT
        self._limit = self._before_compiling = self._of_batch = math.inf
        self.on_new_limit: Callable[[float], None] = lambda _: None
        """Called in the main thread with a limit that differs from the one before. From then on the main thread may
        keep the interpreter, so that no other thread sees the limit."""
        self.awaited = ""
        """What another thread does with all ranks while the main thread waits for it; "" if nothing."""
        self.compilations = 0
        """How often torch has begun or ended to compile in a batch; an odd number while it does."""
        self._told = 0
        """The last batch that has said that it compiles."""
        self._executor: weakref.ref[Running] | None = None
        self.thread = threading.main_thread().ident

    @property
    def limit(self) -> float:
        """How many seconds the rank may stand still."""
        return self._limit

    @limit.setter
    def limit(self, seconds: float) -> None:
        if seconds != self._limit:
            self._limit = seconds
            self.on_new_limit(seconds)

    @property
    def executor(self) -> Running | None:
        """That of the last batch, as long as its engine lives."""
        return None if self._executor is None else self._executor()

    @contextmanager
    def in_batch(
        self, executor: Running, label: str, training: bool, limit: float, ends: bool = True
    ) -> Iterator[None]:
        """A batch, from its data to its end, or a part of it.

        Args:
            label: the batch, in words.
            limit: how many seconds ranks may stand still in it. The first batch of its kind may take longer.
            ends: whether the batch ends with the block.
        """
        self.place, self.label, self._executor = Place.DATA, label, weakref.ref(executor)
        self._of_batch = limit
        self.limit = limit if training in executor.begun else _longer(limit)
        self.thread = threading.get_ident()
        # Last, so that the observer never takes the old batch for the new one.
        self.batch += 1
        try:
            yield
            if ends:
                executor.begun.add(training)
        except Exception:
            self.label = f"{label}, which failed"
            raise
        finally:
            self.place, self.limit = Place.SCRIPT, limit

    def begin_compiling(self) -> None:
        """torch begins to compile. In a batch, the rank may stand still for longer until :meth:`end_compiling`, and the
        first rank says so once, because it may take minutes."""
        if self.place is Place.SCRIPT:
            return
        if self._told != self.batch and (not dist.is_initialized() or dist.get_rank() == 0):
            self._told = self.batch
            print(f"ds_lgamp: {self.label} compiles what layers compute, which may take minutes", file=sys.stderr)
        self.compilations += 1
        self._before_compiling = self.limit
        self.limit = _longer(self._of_batch)

    def end_compiling(self) -> None:
        if self.is_compiling:
            self.compilations += 1
            self.limit = self._before_compiling

    @property
    def is_compiling(self) -> bool:
        return self.compilations % 2 == 1

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """The main thread waits inside the block for ``what`` another thread does with all ranks."""
        self.awaited = what
        try:
            yield
        finally:
            self.awaited = ""

    def __str__(self) -> str:
        """Returns words that follow "stands"."""
        executor = self.executor
        current = None if executor is None else executor.current
        place = f"in {current}" if self.place is Place.BATCH and current is not None else self.place.value
        return placed(place, self.place is not Place.SCRIPT, self.label)


class Observer:
    """Watches the ``whereabouts`` of this ``rank`` from another thread."""

    def __init__(self, rank: int, whereabouts: Whereabouts) -> None:
        self._rank, self._whereabouts = rank, whereabouts
        self._seen: tuple[Any, ...] = ()
        self._since = 0.0

    def look(self, now: float, closely: bool = False) -> Standing:
        """Returns where the rank stands at the time ``now``. What it waits for is found only after it has stood there
        for a while, or if it is to look ``closely``."""
        here = self._whereabouts
        place, batch, label, limit, executor = here.place, here.batch, here.label, here.limit, here.executor
        compilations, compiles = here.compilations, here.is_compiling
        row, doing = (-1, "") if executor is None else (executor.row, executor.doing)
        frame = self._frame() if place is Place.SCRIPT else None
        # The call changes as long as a script does something.
        seen = (batch, place, row, doing, compilations, None if frame is None else (id(frame), frame.f_lasti))
        # While this thread has a frame, the main thread cannot free what is in it.
        del frame
        if seen != self._seen:
            self._seen, self._since = seen, now
        seconds = now - self._since
        inside = place is not Place.SCRIPT
        standing = Standing(self._rank, place.value, batch, label, row, inside, seconds, limit, compiles=compiles)
        if not closely and seconds < asks_after(limit):
            return standing
        return self._explained(standing, place, executor, row, doing)

    def error(self, standing: Standing) -> BaseException | None:
        """Returns the error that the script handles where it has stood for a while, outside of a batch. Ranks that wait
        for it warn later, and then know the cause."""
        if standing.inside or standing.seconds < asks_after(standing.limit):
            return None
        return in_flight_of(self._whereabouts.thread or 0)

    def _explained(self, standing: Standing, place: Place, executor: Running | None, row: int, doing: str) -> Standing:
        frame = self._frame()
        calls = None if frame is None else _calls(frame)
        # Files are read only now.
        del frame
        if calls is not None:
            standing = standing._replace(stack=calls.text())
        waits: tuple[Wait, ...] = ()
        if executor is not None and place is not Place.DATA:
            standing = standing._replace(done=done_before(executor.program, row, executor.neighbours.owners))
            at_end, current = row >= len(executor.program), executor.current
            if place is Place.BATCH and (current is not None or at_end):
                standing = standing._replace(place="at the end of the batch" if at_end else f"in {current}")
                waits = waits_in(executor.program, row, doing, executor.neighbours)
        if not waits and self._whereabouts.awaited:
            waits = (_named(self._whereabouts.awaited, ()),)
        elif not waits and calls is not None:
            waits = calls.waits(self._rank)
        return standing._replace(waits=waits)

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._whereabouts.thread or 0)


def asks_after(limit: float) -> float:
    """Returns after how many seconds a rank that waits asks about all ranks."""
    return min(_ASKED_AFTER, limit / _EARLY)


class _Calls(NamedTuple):
    """The calls of a thread, without its frames."""

    places: list[tuple[str, int, str]]
    """File, line and function, the innermost first."""
    of_torch: tuple[str, tuple[int, ...]] | None
    """The function of torch.distributed that was called, and the ranks on which it depends; none if they are not
    known."""
    group: tuple[int, ...]
    """The ranks of the group at hand in the innermost call."""

    def text(self) -> str:
        lines = [
            f'  File "{file}", line {line}, in {name}\n    {getline(file, line).strip()}\n'
            for file, line, name in self.places
        ]
        return "".join(lines[_FRAMES - 1 :: -1])

    def waits(self, rank: int) -> tuple[Wait, ...]:
        """Returns the call in which ``rank`` waits for other ranks, if there is one: a function of torch.distributed,
        or a wait for what such a function has begun."""
        if self.of_torch is not None:
            name, ranks = self.of_torch
            return (_named(name, ranks)._replace(blocks=rank in ranks and name.startswith(_MEETINGS)),)
        file, line, _ = self.places[0]
        return (_named("what it has begun", self.group),) if "wait(" in getline(file, line) else ()


def _calls(innermost: FrameType) -> _Calls:
    places, of_torch = [], None
    frame: FrameType | None = innermost
    while frame is not None:
        places.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        if frame.f_code.co_filename == dist.distributed_c10d.__file__:
            of_torch = frame.f_code.co_name, _ranks_of(frame)
        frame = frame.f_back
    group = innermost.f_locals.get("group")
    return _Calls(places, of_torch, _members(group) if isinstance(group, dist.ProcessGroup) else ())


def _named(name: str, ranks: tuple[int, ...]) -> Wait:
    others = f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}" if ranks else "all ranks"
    return Wait(ranks, f"{name} with {others}", name)


def _ranks_of(frame: FrameType) -> tuple[int, ...]:
    """Returns the ranks on which a call of torch.distributed depends; none if they are not known."""
    given = frame.f_locals
    for peer in ("src", "dst"):
        if frame.f_code.co_name in ("send", "recv") and isinstance(given.get(peer), int):
            return (given[peer],)
    # Early releases of torch do not take None for the default group here.
    return _members(given.get("group") or dist.group.WORLD)


def _members(group: Any) -> tuple[int, ...]:
    with suppress(Exception):
        return tuple(dist.get_process_group_ranks(group))
    return ()
