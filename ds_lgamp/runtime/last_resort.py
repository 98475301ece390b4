"""The last means of a process that no longer runs: its last message, the system's timer, the device library's
record."""

import faulthandler
import math
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

_LATER = 10.0
"""Seconds beyond the limit, in which others name this rank. Its sudden end would be the news otherwise. The timer is
set anew after half of them."""
_LONGEST = 1e6
"""Seconds; Python's timer takes no more than some thousand times as many."""
_RECORDER = 5.0
"""Seconds to wait for the record of NCCL."""
_FAILED = 1
_later, _cancel = faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later


class LastResort:
    """Ends the process, with the calls of all its threads, if none of them gets the interpreter's lock for too long.

    The timer is that of :mod:`faulthandler`, of which a process has one. It is left alone while the script uses it.
    """

    def __init__(self) -> None:
        self._taken = False
        self._armed: tuple[float, float] | None = None
        """When the timer was set, and to which limit."""
        # Bound once, because a method is a new object whenever it is read.
        self._stand_ins = self._take, self._give_back

    def arm(self, limit: float, now: float) -> None:
        """Ends the process shortly after ``limit``, in seconds from ``now``, unless this is called again before. An
        infinite limit ends nothing."""
        faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later = self._stand_ins
        if math.isinf(limit):
            self.unset()
            return
        is_set = self._armed is not None and now < self._armed[0] + _LATER / 2 and limit == self._armed[1]
        if not self._taken and not is_set:
            self._armed = now, limit
            _later(min(limit + _LATER, _LONGEST), exit=True, file=2)

    def disarm(self) -> None:
        """Ends nothing any more."""
        if (faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later) == self._stand_ins:
            faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later = _later, _cancel
        self.unset()

    def unset(self) -> None:
        """Ends nothing until it is armed again."""
        if self._armed is not None and not self._taken:
            _cancel()
        self._armed = None

    def _take(self, *arguments: Any, **options: Any) -> None:
        self._taken = True
        _later(*arguments, **options)

    def _give_back(self) -> None:
        self._taken, self._armed = False, None
        _cancel()


def dump_flight_recorder(rank: int) -> Path | None:
    """Writes what NCCL's flight recorder has of this rank, to ``TORCH_NCCL_DEBUG_INFO_TEMP_FILE`` and the rank.

    Returns the file; None if this torch has no recorder. Never ran on a GPU.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump is None or not dist.is_initialized() or dist.get_backend() != "nccl":
        return None
    default = Path(tempfile.gettempdir()) / "nccl_trace_rank_"
    file = Path(f"{os.environ.get('TORCH_NCCL_DEBUG_INFO_TEMP_FILE', default)}{rank}")
    file.write_bytes(dump())
    return file


def end(sentence: str, rank: int) -> NoReturn:
    """Ends the process, even where the main thread holds the lock of a stream, or nobody reads one any more."""
    say(sentence)
    for last, seconds in ((sys.stdout.flush, 1.0), (partial(dump_flight_recorder, rank), _RECORDER)):
        _try(last, seconds)
    os._exit(_FAILED)


def say(text: str) -> None:
    """Writes to standard error, but does not wait for a reader."""
    _try(partial(_write, text.encode()), 1.0)


def _write(text: bytes) -> None:
    while text:
        # The system may write a part of it only.
        text = text[os.write(2, text) :]


def _try(act: Callable[[], Any], seconds: float) -> None:
    """Acts, but does not wait for longer than ``seconds``."""

    def attempt() -> None:
        with suppress(Exception):
            act()

    actor = threading.Thread(target=attempt, daemon=True)
    try:
        actor.start()
    except RuntimeError:
        # From Python 3.12 on, none starts once the interpreter shuts down.
        attempt()
    else:
        actor.join(seconds)
