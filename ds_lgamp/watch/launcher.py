"""The launcher of this process: what it says in variables, its end, and SIGTERM, which it sends.

The launcher numbers the processes of a job, which can then talk before ``torch.distributed`` is initialised
(:class:`Launch`). Where it is gone, nobody would end or restart the rank (:class:`Launcher`).

Launchers terminate the other ranks of a node as soon as one has ended, and :class:`Termination` lets a rank say why
before SIGTERM ends it. By default SIGTERM ends a process whatever it does. Here Python's handler writes to a socket
instead, even while the main thread waits in C code. The lifeline's thread reads there, says what it knows, and then
ends the process by the default action. Until then the main thread stands still, if it runs Python code. Forked
processes have the default action.

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
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch.distributed as dist

from ds_lgamp.watch.last_words import Exit

_NODE_NUMBERS = "GROUP_RANK", "CROSS_RANK", "SLURM_NODEID"
"""Variables with the node's number: of torchrun, of the deepspeed launcher and of Slurm."""
_PATIENCE = timedelta(minutes=10)
"""How long the processes of a job wait for each other before ``torch.distributed`` is initialised."""
_VARIABLES = b"TORCHELASTIC_RUN_ID", b"CROSS_RANK"
"""Variables that launchers set for ranks: torchrun and what is built on it, and deepspeed."""
_PROCESSES = Path("/proc")
_TICK = 1.0
NEWS = 1.0
"""Seconds to wait for the news that another rank's end is the reason. Rank 0 may have to notice that yet."""
_HOLD = 2.0
"""Seconds in which the main thread leaves the end to the lifeline's. Writing the last words may take one."""
_HELD = 0
"""What the main thread writes. It is the number of no signal."""
_SENDER = struct.Struct("3i")
"""Process, user and group of the writer to a socket."""


def node_number() -> int | None:
    """Returns the launcher's number of this node; None if the launcher gives none."""
    for name in _NODE_NUMBERS:
        with suppress(KeyError, ValueError):
            return int(os.environ[name])
    return None


def launcher_hosts_store() -> bool:
    """Whether the store of the job lives in the launcher, as torchrun's does, and not in the process of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def attempt() -> str:
    """Returns a text that distinguishes this start of the ranks from earlier ones that used the same store. Where rank
    0 hosts the store, each start has a new one, and torchrun's nodes may count restarts differently."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if launcher_hosts_store() else "0"


def require_launcher() -> None:
    """Raises ValueError if no launcher has set the environment."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ValueError(f"{name} is not set; start with torchrun or deepspeed")


class Launch:
    """The processes of a job, as the launcher numbers them. They talk through the store that the default process group
    will use.

    Raises ValueError if no launcher has set the environment.
    """

    def __init__(self) -> None:
        require_launcher()
        self.rank, self.ranks, self.gpu = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        store, _, _ = next(dist.rendezvous("env://", self.rank, self.ranks, timeout=_PATIENCE))
        self._store = dist.PrefixStore(f"ds_lgamp/launch/{attempt()}", store)
        self._calls = 0

    def everyone(self, own: str) -> list[str]:
        """Returns the ``own`` text of every process, by rank."""
        key = self._key()
        self._store.set(f"{key}/{self.rank}", own)
        return [self._store.get(f"{key}/{rank}").decode() for rank in range(self.ranks)]

    def from_first(self, make: Callable[[], str], patience: timedelta = _PATIENCE) -> str:
        """Returns what ``make`` returns in the process of rank 0, for which all processes wait. If ``make`` raises an
        error there, the other processes raise ValueError."""
        key = self._key()
        if self.rank == 0:
            try:
                self._store.set(key, f"+{make()}")
            except Exception as error:
                self._store.set(key, f"-{error}")
                raise
        self._store.wait([key], patience)
        answer = self._store.get(key).decode()
        if answer.startswith("-"):
            raise ValueError(answer[1:])
        return answer[1:]

    def _key(self) -> str:
        self._calls += 1
        return str(self._calls)


class Launcher:
    """The launcher of this process and the programs between, such as a script of a shell; nothing if there is none.
    Who starts a rank by hand may leave it alone."""

    def __init__(self) -> None:
        chain, process = [], os.getpid()
        while _is_of_a_rank(process):
            process = _parent_of(process)
            chain.append(process)
        # Where all processes up to the first one have the variable, none of them has set it.
        self._chain = chain if process > 0 else []

    @property
    def is_known(self) -> bool:
        return bool(self._chain)

    def is_gone(self) -> bool:
        """Whether it has ended, or a program between."""
        if not self.is_known or os.getppid() != self._chain[0]:
            return self.is_known
        return any(_parent_of(child) != parent for child, parent in zip(self._chain, self._chain[1:]))

    def __str__(self) -> str:
        return f"launcher (process {self._chain[-1]})" if self.is_known else "launcher"


def end_alone_without(launcher: Launcher, own_exit: Exit) -> None:
    """Ends this process, the only rank of its job, once its ``launcher`` is gone."""
    if not launcher.is_known:
        return

    def watch() -> None:
        while not launcher.is_gone():
            time.sleep(_TICK)
        own_exit.end(f"ds_lgamp: this rank lost its {launcher}, which was killed or has ended; it ends\n", 0)

    threading.Thread(target=watch, name="ds_lgamp launcher", daemon=True).start()


def _is_of_a_rank(process: int) -> bool:
    """Whether a launcher has started ``process``. One that may not be read is a launcher."""
    with suppress(OSError):
        variables = (_PROCESSES / str(process) / "environ").read_bytes().split(b"\0")
        return any(each.partition(b"=")[0] in _VARIABLES for each in variables)
    return False


def _parent_of(process: int) -> int:
    """The parent of a process, 0 if it has none or has ended."""
    with suppress(OSError):
        return int((_PROCESSES / str(process) / "stat").read_text(errors="replace").rpartition(") ")[2].split()[1])
    return 0


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

        In the main thread this undoes all that :meth:`catch` has done. In other threads Python still names the handler.
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
        time.sleep(_HOLD)
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
