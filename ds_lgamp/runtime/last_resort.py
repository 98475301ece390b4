"""What works where nothing in this process does: the system's clock ends it, and the device library's own record."""

import faulthandler
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_LATER = 10.0
"""Seconds beyond the limit, in which others name this rank. Its sudden end would be the news otherwise. The timer is
set anew after half of them."""
_LONGEST = 1e6
"""Seconds; Python's timer takes no more than some thousand times as many."""
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
        """Ends the process shortly after ``limit``, in seconds from ``now``, unless this is called again before."""
        faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later = self._stand_ins
        is_set = self._armed is not None and now < self._armed[0] + _LATER / 2 and limit == self._armed[1]
        if not self._taken and not is_set:
            self._armed = now, limit
            _later(min(limit + _LATER, _LONGEST), exit=True, file=2)

    def disarm(self) -> None:
        """Ends nothing any more."""
        if (faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later) == self._stand_ins:
            faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later = _later, _cancel
        if self._armed is not None and not self._taken:
            _cancel()

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
