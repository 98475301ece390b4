"""Keeps DeepSpeed from compiling at the start of a job, and names the lock that a killed compilation has left."""

import logging
import os
import threading
import time
from contextlib import ExitStack, suppress
from functools import wraps
from pathlib import Path

import deepspeed.ops
from torch.utils.file_baton import FileBaton

from ds_lgamp.integrations.replacing import replace_attribute

logger = logging.getLogger(__name__)
_LOOKS_EVERY = 5.0
"""Seconds between two looks at a lock."""


def compile_no_collective() -> None:
    """Keeps ``deepspeed.init_distributed`` from compiling a collective for the CPU. Training does not call that
    collective, and compiling it takes half a minute and needs a compiler."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def name_forgotten_locks(undo: ExitStack) -> None:
    """From now on, a process that waits for a forgotten lock logs which file to remove.

    torch locks the folder of an extension with a file. A process that is killed while it compiles leaves the file
    behind, and every later process waits for it in silence.
    """
    stock = FileBaton.wait

    @wraps(stock)
    def wait(self: FileBaton) -> None:
        over = threading.Event()
        watch = threading.Thread(target=_watch, args=(Path(self.lock_file_path), over), daemon=True)
        watch.start()
        try:
            stock(self)
        finally:
            over.set()
            watch.join()

    replace_attribute(FileBaton, stock.__name__, wait, undo)


def _watch(lock: Path, over: threading.Event) -> None:
    """Logs ``lock`` once, as soon as no process has it open. One rank of a machine logs for all of them."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    while not over.wait(_LOOKS_EVERY):
        with suppress(FileNotFoundError):
            if not _is_open(lock):
                age = time.time() - lock.stat().st_mtime
                logger.warning(
                    f"ds_lgamp: DeepSpeed waits for the lock {lock}, which is {age:.0f} s old, but no process of this "
                    f"machine compiles; if no other machine compiles either, remove the file: rm {lock}"
                )
                return


def _is_open(file: Path) -> bool:
    """Whether a process of this machine has ``file`` open, as far as this user can see. A process that compiles keeps
    its lock open. True where the system has no /proc."""
    if not Path("/proc/self/fd").exists():
        return True
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.path.samefile(descriptor, file):
                return True
    return False
