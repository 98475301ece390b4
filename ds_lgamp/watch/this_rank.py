"""Ends a rank when another one dies, whatever it waits for.

A process has one lifeline: the connections and the thread of :mod:`ds_lgamp.watch.lifeline`.
"""

import json
import logging
import os
import secrets
import socket
import weakref
from multiprocessing.util import Finalize

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ds_lgamp.watch import last_words
from ds_lgamp.watch.connections import Member, listen, own_address
from ds_lgamp.watch.launcher import Launcher, attempt, end_alone_without
from ds_lgamp.watch.lifeline import Lifeline

logger = logging.getLogger(__name__)
_current: Lifeline | None = None
_group: "weakref.ref[dist.ProcessGroup] | None" = None
"""The default group for which :func:`start` was called last, as long as it exists."""
_starts = 0
_launcher = Launcher()
"""Looked up at once: a launcher that ends before the first batch is noticed there."""


def start() -> None:
    """From now on, a rank that dies ends this rank, until the default group or the process ends.

    All ranks call it. Does nothing where it was called for this default group already. A rank that cannot reach the
    others logs why, and goes on. A rank without others only ends with its launcher.
    """
    global _current, _group, _starts
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialised"
    if _group is not None and _group() is world:
        return
    _leave()
    _group = weakref.ref(world)
    if dist.get_world_size() == 1:
        end_alone_without(_launcher)
        return
    _starts += 1
    store, rank = _get_default_store(), dist.get_rank()
    # Later default groups may have the same store: those of this process, and those of a job that torchrun restarts.
    key = f"ds_lgamp/lifeline/{attempt()}/{_starts}"
    address = own_address(store)
    listener = listen(address, os.environ.get("LOCAL_WORLD_SIZE") == str(dist.get_world_size()))
    own = Member(rank, socket.gethostname(), address, listener.getsockname()[1])
    if rank == 0:
        store.set(key, json.dumps([secrets.token_hex(16), *own]))
    token, *hub = json.loads(store.get(key))
    lifeline = Lifeline(own, listener, token, dist.get_world_size(), _launcher)
    try:
        lifeline.start(None if rank == 0 else Member(*hub))
    except OSError as error:
        lifeline.let_go()
        logger.warning(
            f"ds_lgamp: {own.name} cannot reach {Member(*hub).name} at {hub[2]}:{hub[3]} ({error}): where a rank dies, "
            "others may wait for ever; let the ranks of this job connect to each other at any port"
        )
        return
    _current = lifeline
    # Unlike atexit, this also works in processes that multiprocessing starts.
    _current.ending = Finalize(None, _end, exitpriority=0)


def leave() -> None:
    """Says goodbye to the other ranks, if this rank is among them and ends well. A rank that handles an error may end
    because of it: it says goodbye when it is done with the error, at the end of the process at the latest."""
    if last_words.in_flight() is None and not last_words.failing():
        _leave()


def is_held() -> bool:
    """Whether this rank is among others, and has not said goodbye."""
    return _current is not None


def news() -> str:
    """See :meth:`Lifeline.news`. Returns "" without a lifeline."""
    return "" if _current is None else _current.news()


def fail(cause: str, refused: bool = False) -> str:
    """See :meth:`Lifeline.fail`. Returns "" without a lifeline."""
    return "" if _current is None else _current.fail(cause, refused)


def announce(cause: str, meanwhile: str = "") -> None:
    """See :meth:`Lifeline.announce`. Does nothing without a lifeline."""
    if _current is not None:
        _current.announce(cause, meanwhile)


def a_rank_fails() -> bool:
    """Whether a rank fails, but completes a checkpoint with the others first."""
    return _current is not None and _current.a_rank_fails


def _end() -> None:
    """Says goodbye at the end of the process, or what it ends with."""
    error = last_words.unhandled()
    if error is not None:
        fail(last_words.cause(error))
    else:
        leave()


def _leave() -> None:
    global _current, _group
    left, _current, _group = _current, None, None
    if left is not None:
        left.ending.cancel()
        left.leave()


def _let_go() -> None:
    """Otherwise a forked process, such as a loader of data, would keep the connections of its dead parent open."""
    global _current, _launcher
    left, _current, _launcher = _current, None, Launcher()
    if left is not None:
        left.let_go()


os.register_at_fork(after_in_child=_let_go)
