"""Lets a rank say why before SIGTERM ends it. Launchers terminate the other ranks of a node as soon as one has ended.

By default SIGTERM ends a process whatever it does. Here Python's handler writes to a socket instead, even while the
main thread waits in C code. The lifeline's thread reads there, says what it knows, and then ends the process by the
default action. Until then the main thread stands still, if it runs Python code. Forked processes have the default
action.

A handler that the script sets in Python has precedence, be it set earlier or later. The thread needs the interpreter:
where the main thread keeps it, SIGTERM ends the process once it is given away, or its launcher kills it. The same holds
if the script later lets signals be written to another file: a main thread that waits in C code then learns of none.
"""

import ctypes
import os
import re
import signal
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

NEWS = 1.0
"""Seconds to wait for the news that another rank's end is the reason. Rank 0 may have to notice that yet."""
_PATIENCE = 2.0
"""Seconds in which the main thread leaves the end to the lifeline's. Writing the last words may take one."""
_HELD = 0
"""What the main thread writes. It is the number of no signal."""
_SENDER = struct.Struct("3i")
"""Process, user and group of the writer to a socket."""


class Termination:
    """SIGTERM to this process. A thread can wait for it as for a file."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._alarm, self._bell = socket.socketpair()
        for end in (self._alarm, self._bell):
            end.setblocking(False)
        # A process that a library forks may have this process's handler and sockets, and be terminated.
        self._bell.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._caught = self._come = False

    def fileno(self) -> int:
        return self._bell.fileno()

    def catch(self) -> None:
        """From now on SIGTERM does not end this process, but lets the thread that waits for it do so.

        Does nothing in another thread than the main one, where SIGTERM has another action than the default one, or
        where signals are written to another file.
        """
        if threading.current_thread() is not threading.main_thread() or not _has_default_action():
            return
        other = signal.set_wakeup_fd(self._alarm.fileno(), warn_on_full_buffer=False)
        if other != -1:
            signal.set_wakeup_fd(other)
            return
        signal.signal(signal.SIGTERM, self._hold)
        self._caught = True

    def has_come(self) -> bool:
        """Whether SIGTERM has come to this process, and no handler of the script has taken it."""
        if os.getpid() != self._process:
            # This one was forked, and what it would read here is its parent's.
            return False
        # Nothing is left to read, or this one is closed.
        with suppress(OSError):
            while True:
                numbers, [(_, _, sender)], _, _ = self._bell.recvmsg(64, socket.CMSG_SPACE(_SENDER.size))
                is_own = _SENDER.unpack(sender)[0] == self._process
                self._come |= is_own and (_HELD in numbers or (signal.SIGTERM in numbers and self._is_in_place()))
        return self._come

    def release(self) -> None:
        """Gives SIGTERM its default action back, and ends this process if it has come.

        In the main thread this undoes all that :meth:`catch` has done. In others Python still names the handler.
        """
        if self._caught and self._is_in_place():
            _set_default_action()
        if self._caught and threading.current_thread() is threading.main_thread():
            self._undo()
        if self.has_come():
            self.end()

    def close(self) -> None:
        """Releases SIGTERM. Closes the sockets, unless signals are still written there."""
        self.release()
        if not self._caught:
            self._alarm.close()
            self._bell.close()

    def end(self) -> NoReturn:
        """Ends this process by the default action of SIGTERM."""
        _set_default_action()
        os.kill(os.getpid(), signal.SIGTERM)
        # The first process of a container outlives that, and one that blocks SIGTERM.
        os._exit(128 + signal.SIGTERM)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        """What the main thread does at SIGTERM. A handler that the script has set later may call this, too."""
        # The script may have set another file for signals since.
        with suppress(OSError):
            self._alarm.send(bytes([_HELD]))
        time.sleep(_PATIENCE)
        self.end()

    def _is_in_place(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._hold

    def _undo(self) -> None:
        self._caught = False
        if self._is_in_place():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        other = signal.set_wakeup_fd(-1)
        if other not in (-1, self._alarm.fileno()):
            signal.set_wakeup_fd(other)


def _has_default_action() -> bool:
    """Whether nothing handles or ignores SIGTERM, neither Python code nor a library."""
    with suppress(OSError):
        handled = re.findall(r"^Sig(?:Ign|Cgt):\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return not any(int(signals, 16) >> (signal.SIGTERM - 1) & 1 for signals in handled)
    return False


def _set_default_action() -> None:
    # signal.signal refuses to do so in another thread than the main one.
    ctypes.CDLL(None).signal(signal.SIGTERM, None)
