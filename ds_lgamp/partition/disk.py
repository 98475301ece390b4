"""A disk is the home of tensors. They are views of a file, which threads read and write past the page cache.

Code that needs few values, such as a checkpoint, reads and writes a tensor on the disk like any other: its memory is
mapped to the file. What moves in every step is read and written with ``O_DIRECT`` where the file system can, in pieces
by several threads, between the file and buffers. The kernel keeps both ways coherent as long as they follow one
another: before a direct read it writes changed pages, and before a direct write it drops pages of the cache.

The file loses its name as soon as it is open. Its space returns when the process ends, however it ends, and nothing is
left that a later run could read. Only checkpoints outlive a run.
"""

import ctypes
import errno
import mmap
import os
import shutil
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ds_lgamp.cost.offload import room

# O_DIRECT needs addresses, offsets and lengths that are multiples of DISK_BLOCK.
from ds_lgamp.schedule.spec import DISK_BLOCK, PIECE, PIECES

Move = Callable[[int, list, int], int]
"""``os.preadv`` or ``os.pwritev``."""
_Job = tuple[Callable[[], None], "Future[None]"]
"""Moves a piece, and the end of that."""
_Queue = SimpleQueue[_Job]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_HUGE_PAGE = 2 << 20
"""Bytes of one on x86. Kernels with larger ones use them where the memory is large enough."""


class Disk:
    """A folder on a disk, with one file of this rank. Several threads may use it.

    Args:
        path: the folder.
        key: the name of the configuration key that gives the path, for errors.

    Raises:
        ValueError: the path is no folder, or no file can be made there. The message names key, path and fix.
    """

    def __init__(self, path: str | Path, key: str = "nvme_path") -> None:
        self.bytes_read = self.bytes_written = 0
        """Bytes that have begun to move between the file and buffers."""
        self.bytes_taken = 0
        """The size of the file."""
        self._path, self._subject = Path(path), f"{key} is {str(path)!r}"
        self._file = _File(self._path, self._subject)
        self._lock = Lock()
        self._offsets = WeakIdKeyDictionary()
        """Where in the file a tensor begins."""
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        """Where free space begins, by its bytes. A finalizer touches nothing but the lists."""
        self._readers, self._writers = _Threads(), _Threads()

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor [size] on the disk. It takes its space at once, which returns to this disk when nobody has
        the tensor any more.

        Raises:
            ValueError: the disk has too little space.
        """
        bytes_ = max(room(size * dtype.itemsize), DISK_BLOCK)
        with self._lock:
            fitting = [there for there, offsets in self._free.items() if offsets and there >= bytes_]
            taken = min(fitting, default=bytes_)
            offset = self._free[taken].pop() if fitting else self._extend(bytes_)
            give_back = self._free[taken].append
        memory = _mapped(self._file.descriptor, offset, bytes_)
        weakref.finalize(memory, give_back, offset).atexit = False
        tensor = torch.frombuffer(memory, dtype=torch.uint8)[: size * dtype.itemsize].view(dtype)
        self._offsets[tensor] = offset
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether :meth:`empty` made this tensor. Views of it are not known."""
        return tensor in self._offsets

    def read(self, home: torch.Tensor, memory: torch.Tensor, start: int = 0, first: bool = False) -> "Moving":
        """Starts to read bytes of ``home`` from byte ``start`` on to ``memory``.

        Args:
            home: a tensor on this disk, which nobody writes meanwhile.
            start: a multiple of :data:`DISK_BLOCK`.
            memory: bytes from :func:`aligned`, as many as should be read; a multiple of :data:`DISK_BLOCK`.
            first: whether it goes before all that waits and is not ``first``: compute waits for what crosses the bus,
                and updates are read ahead.
        """
        with self._lock:
            self.bytes_read += memory.nbytes
        return self._start(True, home, memory, start, first)

    def write(self, home: torch.Tensor, memory: torch.Tensor, start: int = 0, first: bool = False) -> "Moving":
        """Starts to write ``memory`` to ``home``, as :meth:`read` does the other way."""
        with self._lock:
            self.bytes_written += memory.nbytes
        return self._start(False, home, memory, start, first)

    def _start(self, reads: bool, home: torch.Tensor, memory: torch.Tensor, start: int, first: bool) -> "Moving":
        move, threads = (os.preadv, self._readers) if reads else (os.pwritev, self._writers)
        offset, size = self._offsets[home] + start, memory.nbytes
        pieces = [partial(self._move, move, memory[at : at + PIECE], offset + at) for at in range(0, size, PIECE)]
        jobs = [threads.start(piece, first) for piece in pieces]
        return Moving(jobs, f"{self._subject}, where a file cannot be {'read' if reads else 'written'}")

    def _move(self, move: Move, memory: torch.Tensor, start: int) -> None:
        """Reads or writes ``memory`` from byte ``start`` of the file on. The kernel may move it in several portions."""
        moved, size = 0, memory.nbytes
        while moved < size:
            portion = (ctypes.c_ubyte * (size - moved)).from_address(memory.data_ptr() + moved)
            count = move(self._file.direct, [portion], start + moved)
            if count <= 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            moved += count

    def _extend(self, size: int) -> int:
        offset = self.bytes_taken
        try:
            # Space that is taken here cannot run out later.
            os.posix_fallocate(self._file.descriptor, offset, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            free = shutil.disk_usage(self._path).free
            raise ValueError(
                f"{self._subject}, where {free / 1e9:.3g} GB are free, but this rank needs {size / 1e9:.3g} GB more "
                f"than the {offset / 1e9:.3g} GB that it has; free space or name a folder on a larger disk"
            ) from error
        self.bytes_taken += size
        return offset


class Moving:
    """Bytes that are under way between the file and memory."""

    def __init__(self, jobs: Sequence["Future[None]"], complaint: str) -> None:
        self._jobs, self._complaint = jobs, complaint

    def wait(self) -> None:
        """Blocks until they are there. Raises OSError if the disk fails; the message names key, path and fix."""
        self.settle()
        try:
            for job in self._jobs:
                job.result()
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self._complaint} ({os.strerror(error.errno or 0)}); check the disk and its free space, then resume "
                "from the last checkpoint",
            ) from error

    def settle(self) -> None:
        """Blocks until nothing reads or writes the memory any more, whether or not the disk has failed."""
        wait(self._jobs)


def aligned(size: int, pinned: bool = False) -> torch.Tensor:
    """Returns ``size`` bytes of memory that the disk can read and write."""
    if pinned:
        # It begins with a page.
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    # Past the page cache, the kernel describes memory to the disk page by page. In a virtual machine, huge pages read
    # and write two to three times as fast (docs/offload.md). Where there are none, the memory is as good as other.
    whole = torch.empty(size + _HUGE_PAGE, dtype=torch.uint8, device="cpu")
    memory = whole[-whole.data_ptr() % _HUGE_PAGE :][:size]
    _libc.madvise(memory.data_ptr(), size, mmap.MADV_HUGEPAGE)
    return memory


class _Threads:
    """Move pieces of one direction, each when one of them is free. They begin and end with the object.

    The last updates of a script are awaited when the process is about to end. A ThreadPoolExecutor would refuse them,
    and Python 3.12 starts no thread then.
    """

    def __init__(self) -> None:
        self._first, self._later = _Queue(), _Queue()
        self._turns: SimpleQueue[bool] = SimpleQueue()
        """True for each piece that waits, and False for each thread that shall end. Only a SimpleQueue takes what a
        finalizer puts."""
        for _ in range(PIECES):
            weakref.finalize(self, self._turns.put, False)
            served = self._turns, self._first, self._later
            Thread(target=_serve, args=served, name="ds_lgamp disk", daemon=True).start()

    def start(self, move: Callable[[], None], first: bool) -> "Future[None]":
        over: Future[None] = Future()
        (self._first if first else self._later).put((move, over))
        self._turns.put(True)
        return over


def _serve(turns: "SimpleQueue[bool]", first: _Queue, later: _Queue) -> None:
    while turns.get():
        try:
            move, over = first.get_nowait()
        except Empty:
            move, over = later.get_nowait()
        failure = None
        try:
            move()
        except BaseException as error:
            failure = error
        # The thread must not keep memory and file alive: not while it waits for the next piece, and not once a waiter
        # knows that this one is over.
        del move
        over.set_exception(failure) if failure is not None else over.set_result(None)
        del over, failure


def _mapped(descriptor: int, offset: int, size: int) -> "ctypes.Array[ctypes.c_ubyte]":
    """Maps a part of a file. The module mmap would keep a descriptor for each."""
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, offset)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_ubyte * size).from_address(address)
    # At the end of the process somebody may still have the tensor.
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return memory


class _File:
    """A file without a name. It is closed, and its space returns, when nobody has the disk and its tensors."""

    def __init__(self, path: Path, subject: str) -> None:
        if not path.is_dir():
            raise ValueError(f"{subject}, which is no folder on this machine; create it or name another one")
        try:
            with tempfile.TemporaryDirectory(prefix="ds_lgamp-", dir=path, ignore_cleanup_errors=True) as folder:
                name = os.path.join(folder, "home")
                self.descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
                self.direct = _opened_directly(name, self.descriptor)
        except OSError as error:
            raise ValueError(
                f"{subject}, where this rank cannot make files ({error.strerror}); allow it or name another folder"
            ) from error
        for descriptor in {self.descriptor, self.direct}:
            weakref.finalize(self, os.close, descriptor)


def _opened_directly(name: str, descriptor: int) -> int:
    """Returns a second descriptor that moves past the page cache; the same one if the file system cannot do that."""
    try:
        return os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return descriptor
