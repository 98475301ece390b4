"""Notices that the launcher of this process is gone. Nobody would then end or restart its rank."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from ds_lgamp.runtime.last_resort import end

_VARIABLES = b"TORCHELASTIC_RUN_ID", b"CROSS_RANK"
"""Variables that launchers set for ranks: torchrun and what is built on it, and deepspeed."""
_PROCESSES = Path("/proc")
_TICK = 1.0


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


def end_alone_without(launcher: Launcher) -> None:
    """Ends this process, the only rank of its job, once its ``launcher`` is gone."""
    if not launcher.is_known:
        return

    def watch() -> None:
        while not launcher.is_gone():
            time.sleep(_TICK)
        end(f"ds_lgamp: this rank lost its {launcher}, which was killed or has ended; it ends\n", 0)

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
