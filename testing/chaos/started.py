"""Starts a job under torchrun, and waits for its end."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from testing import ROOT, SCRIPTS
from testing.chaos.faults import FAULTS, SUCCESS
from testing.chaos.jobs import Job
from testing.launching import ON_CPU, free_port
from testing.namespaces import address, throttled_network
from testing.processes import is_alive, wait

SCRIPT = SCRIPTS / "meets_chaos.py"
START = 120.0
"""Seconds for a job to come to its fault."""
OF_TORCHRUN = 60.0
"""Seconds in which torchrun ends after its ranks. It gives some of them half of that."""
SAMPLED_EVERY = 0.5
"""Seconds between two looks at how long threads had to wait for a core."""
OF = "DS_LGAMP_CHAOS"
"""The variable with the job's folder, which all its processes have."""


class End(NamedTuple):
    """How a start of a job ended."""

    status: int | None
    """The launcher's; None if it ran on for too long."""
    seconds: float
    """From the fault, or from the start without one, to the end of the last rank that can end."""
    output: str
    met: bool
    """Whether the fault happened. A rank that reads no data cannot meet one there."""
    starved: float = 0.0
    """How many of the seconds some thread of the job was ready to run, but had no core."""
    left: tuple[str, ...] = ()
    """Processes that remained."""


def start(job: Job, folder: Path, disturbed: bool) -> End:
    """Starts the job and waits for its end.

    Raises NetworkUnavailable if the fault needs a network that this machine cannot make.
    """
    fault = job.fault if disturbed else ""
    for file in [*folder.glob("rank *"), folder / "fault", folder / "cut"]:
        file.unlink(missing_ok=True)
    with ExitStack() as stack:
        network = stack.enter_context(throttled_network(job.ranks, "1gbit")) if fault == "dead link" else None
        holders = [] if network is None else network.holders
        told = folder / "job.json"
        told.write_text(json.dumps({**job._asdict(), "fault": fault, "folder": str(folder), "holders": holders}))
        output = stack.enter_context(tempfile.TemporaryFile("w+"))
        started = _Started(job, fault, folder, told, holders, output)
        stack.callback(started.kill)
        started.await_fault()
        if network is not None and started.met:
            network.cut(job.rank, job.other)
            (folder / "cut").touch()
        started.await_end()
        left = started.left()
        output.seek(0)
        return End(started.process.poll(), started.seconds, output.read(), started.met, started.starved, left)


class _Started:
    """A job that runs.

    Args:
        fault: the one that its rank meets; "" for none.
        told: the file that the ranks read.
        holders: by rank, the process that has its network; none if all share this machine's.
        output: where the job prints.
    """

    def __init__(self, job: Job, fault: str, folder: Path, told: Path, holders: list[int], output: Any) -> None:
        self.job, self.fault, self.folder = job, fault, folder
        self.seconds = self.starved = 0.0
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(job.ranks)]
        if holders:
            meeting = ["--node_rank", "0", "--master_addr", address(0), "--master_port", str(free_port())]
            command = ["nsenter", f"--net=/proc/{holders[0]}/ns/net", *command, *meeting]
        else:
            command += ["--standalone"]
        # The script's folder takes the place of this one on the path.
        own = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), OF: str(folder)}
        self.process = subprocess.Popen(
            [*command, "-m", "ds_lgamp", "run", str(SCRIPT), str(told)],
            **{"cwd": ROOT, "env": {**os.environ, **ON_CPU, **own}, "stdout": output, "stderr": subprocess.STDOUT},
        )

    @property
    def met(self) -> bool:
        return (self.folder / "fault").exists()

    def await_fault(self) -> None:
        """Waits for a fault that ends the job."""
        if self.fault and FAULTS[self.fault].seconds is not None:
            wait(lambda: self.met or self._ended(), START)

    def await_end(self) -> None:
        """Waits for the end of all ranks that can end, and then of the launcher. Keeps the time since the fault."""
        begun, starving = time.monotonic(), _Starving()
        stopped = self.job.rank if self.fault == "SIGSTOP" else None
        fails = self.met and FAULTS[self.fault].seconds is not None

        def over() -> bool:
            starving.look([self.process.pid, *self._ranks()])
            return self._ended() or (fails and not self._ranks(stopped))

        wait(over, START + SUCCESS)
        self.seconds, self.starved = time.monotonic() - begun, starving.seconds
        if stopped is not None and over():
            # The launcher would do so after half a minute.
            self._send(signal.SIGKILL, self._ranks())
        wait(self._ended, OF_TORCHRUN)

    def left(self) -> tuple[str, ...]:
        """Returns the processes of the job that do not end with it."""
        if not self._ended():
            return ()
        wait(lambda: not any(self._processes()), 5)
        return tuple(" ".join(process.cmdline()) for process in self._processes())

    def kill(self) -> None:
        self._send(signal.SIGKILL, [process.pid for process in self._processes()])
        self.process.wait()

    def _ended(self) -> bool:
        return self.process.poll() is not None

    def _ranks(self, except_for: int | None = None) -> list[int]:
        """Returns the processes of ranks that run."""
        files = {int(file.name.removeprefix("rank ")): file for file in self.folder.glob("rank *")}
        pids = [int(file.read_text() or 0) for rank, file in files.items() if rank != except_for]
        return [pid for pid in pids if pid and is_alive(pid)]

    def _processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(OF) == str(self.folder) and is_alive(process.pid):
                    yield process

    @staticmethod
    def _send(number: int, pids: list[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class _Starving:
    """How long threads were ready to run and had no core since the first look, according to Linux's scheduler."""

    def __init__(self) -> None:
        self._first: dict[Path, int] = {}
        self._last: dict[Path, int] = {}
        self._next = 0.0

    def look(self, pids: list[int]) -> None:
        if time.monotonic() < self._next:
            return
        first = not self._first
        for thread in (thread for pid in pids for thread in Path(f"/proc/{pid}/task").glob("*/schedstat")):
            with suppress(OSError, IndexError):
                self._last[thread] = int(thread.read_text().split()[1])
                self._first.setdefault(thread, self._last[thread] if first else 0)
        self._next = time.monotonic() + SAMPLED_EVERY

    @property
    def seconds(self) -> float:
        """That of the thread that waited longest."""
        return max((last - self._first[thread] for thread, last in self._last.items()), default=0) / 1e9
