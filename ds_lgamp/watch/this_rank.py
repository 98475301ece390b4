"""What the engines of this process share: its place in the job, its lifeline, and the work that its end waits for.

A process is one rank of one job, however many engines its script builds. So it has one :class:`ThisRank`, and code
outside of this room finds it in one place: :data:`this_rank`. Everything else belongs to a single engine.
"""

import json
import logging
import os
import secrets
import socket
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ds_lgamp.cost.assignment import Assignment
from ds_lgamp.watch.connections import Member, listen, own_address
from ds_lgamp.watch.last_words import Exit, cause, in_flight, unhandled
from ds_lgamp.watch.launcher import Launch, Launcher, attempt, end_alone_without
from ds_lgamp.watch.lifeline import Lifeline, Process
from ds_lgamp.watch.whereabouts import Whereabouts

logger = logging.getLogger(__name__)


class Flight(Protocol):
    """Something that was launched. Any thread may call it."""

    def begin(self) -> None:
        """It begins only now."""

    def end(self) -> None:
        """It is over."""


class Recorder(Protocol):
    """Records launches."""

    def launch(self, lane: str, moved: int) -> Flight:
        """Records a launch of this thread in a ``lane`` of the recording, with the bytes that it moves."""
        ...


class ThisRank:
    """A process as a rank of its job."""

    def __init__(self) -> None:
        self.whereabouts, self.exit = Whereabouts(), Exit()
        self.launcher = Launcher()
        """Looked up at once: a launcher that ends before the first batch is noticed there."""
        self.launch: Launch | None = None
        """How processes talked before ``torch.distributed`` was initialised; None if they did not. It may hold the
        store of the job, which the default process group takes over."""
        self.assignment: Assignment | None = None
        """The ranks and networks of the cluster file; None if there is none."""
        self.lifeline: Lifeline | None = None
        """None before :meth:`start`, without other ranks, and after the goodbye."""
        self._group: weakref.ref[dist.ProcessGroup] | None = None
        """The default group for which :meth:`start` was called last, as long as it exists."""
        self._starts = 0
        self._goodbye: Finalize | None = None
        """Calls :meth:`end` at the end of the process."""

        self.recorder: Recorder | None = None
        """Records the step that runs; None while nobody records."""
        self.traces: weakref.WeakValueDictionary[Path, Any] = weakref.WeakValueDictionary()
        """The traces of living engines, by folder."""
        self.models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """The models of ``engine(batch)`` scripts that have an engine, or had one: their methods and parameters are its
        own."""

        self.agreements: dict[Callable[[], None], None] = {}
        """What ranks agree on at the end, before any engine is asked to end: engines of other ranks may live longer."""
        self.engines: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        """Living engines that gather parameters in the background, in the order in which they began, which is the same
        on all ranks; a set would have another order on each rank."""
        self.savers: list[Any] = []
        """Savers that are writing a checkpoint, in the order they began."""
        self.live_checkpoints: weakref.WeakSet[Any] = weakref.WeakSet()
        """The live states of living engines."""

    def start(self) -> None:
        """From now on, a rank that dies ends this rank, until the default group or the process ends.

        All ranks call it. Does nothing where it was called for this default group already. A rank that cannot reach the
        others logs why, and goes on. A single rank only ends with its launcher.
        """
        world = dist.group.WORLD
        assert world is not None, "torch.distributed is initialised"
        if self._group is not None and self._group() is world:
            return
        self._say_goodbye()
        self._group = weakref.ref(world)
        if dist.get_world_size() == 1:
            end_alone_without(self.launcher, self.exit)
            return
        self._starts += 1
        store, rank = _get_default_store(), dist.get_rank()
        # Later default groups may have the same store: in this process, or in a job that torchrun
        # restarts.
        key = f"ds_lgamp/lifeline/{attempt()}/{self._starts}"
        address = own_address(store)
        listener = listen(address, os.environ.get("LOCAL_WORLD_SIZE") == str(dist.get_world_size()))
        own = Member(rank, socket.gethostname(), address, listener.getsockname()[1])
        if rank == 0:
            store.set(key, json.dumps([secrets.token_hex(16), *own]))
        token, *hub = json.loads(store.get(key))
        process = Process(self.launcher, self.whereabouts, self.exit)
        lifeline = Lifeline(own, listener, token, dist.get_world_size(), process)
        try:
            lifeline.start(None if rank == 0 else Member(*hub))
        except OSError as error:
            lifeline.let_go()
            logger.warning(
                f"ds_lgamp: {own.name} cannot reach {Member(*hub).name} at {hub[2]}:{hub[3]} ({error}): where a rank "
                "dies, others may wait for ever; let the ranks of this job connect to each other at any port"
            )
            return
        self.lifeline = lifeline
        # Unlike atexit, this also works in processes that multiprocessing starts.
        self._goodbye = Finalize(None, self.end, exitpriority=0)

    def leave(self) -> None:
        """Says goodbye to the other ranks, if this rank is among them and ends well. A rank that handles an error may
        end because of it: it says goodbye when it is done with the error, at the end of the process at the latest."""
        if in_flight() is None and not self.exit.failing:
            self._say_goodbye()

    def news(self) -> str:
        """See :meth:`Lifeline.news`. Returns "" without a lifeline."""
        return "" if self.lifeline is None else self.lifeline.news()

    def fail(self, cause: str, refused: bool = False) -> str:
        """See :meth:`Lifeline.fail`. Returns "" without a lifeline."""
        return "" if self.lifeline is None else self.lifeline.fail(cause, refused)

    def announce(self, cause: str, meanwhile: str = "", exits: bool = False) -> None:
        """See :meth:`Lifeline.announce`. Does nothing without a lifeline."""
        if self.lifeline is not None:
            self.lifeline.announce(cause, meanwhile, exits)

    @property
    def a_rank_fails(self) -> bool:
        """Whether a rank fails, but completes a checkpoint with all ranks first."""
        return self.lifeline is not None and self.lifeline.a_rank_fails

    def end(self) -> None:
        """Says goodbye at the end of the process, or what it ends with."""
        error = unhandled()
        if error is not None:
            self.fail(cause(error))
        else:
            self.leave()

    def let_go(self) -> None:
        """Leaves the job to the parent of this forked process. Otherwise the fork, such as a loader of data, would keep
        the connections of its dead parent open."""
        left, self.lifeline, self.launcher = self.lifeline, None, Launcher()
        if left is not None:
            left.let_go()

    def _say_goodbye(self) -> None:
        left, self.lifeline, self._group = self.lifeline, None, None
        if left is not None:
            if self._goodbye is not None:
                self._goodbye.cancel()
            left.leave()


this_rank = ThisRank()
os.register_at_fork(after_in_child=this_rank.let_go)
