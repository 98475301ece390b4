"""Disturbs training jobs at random, and judges how they end: ``python -m testing.chaos --minutes 3 --seed 1``.

Every job has a random layout, door and fault. It must end in success, or within its bound with a sentence that names
the rank that met the fault. Every checkpoint that it published must load. Then the same job starts again, undisturbed:
it must go on from its newest whole checkpoint and have the loss curve of a job that nothing happened to. The faults
are those of torchft's and NVIDIA's resiliency extension's tests, and more.
"""

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ds_lgamp.checkpoint.errors import CheckpointError
from ds_lgamp.checkpoint.folder import STATE, read_latest
from ds_lgamp.checkpoint.verify import verify
from testing import ROOT, SCRIPTS
from testing.launching import ON_CPU

SCRIPT = SCRIPTS / "meets_chaos.py"
HOST = socket.gethostname()
HANG_TIMEOUT = 8.0
DEATH, STALL = 15.0, HANG_TIMEOUT + 15.0
"""Seconds from a fault in which all ranks that can end have ended."""
START, SUCCESS = 120.0, 120.0
"""Seconds for a job to begin, and to end where nothing prevents it."""
STEPS = 8


class Expected(NamedTuple):
    """How a job with a fault must end."""

    seconds: float | None
    """From the fault; None if the job must succeed."""
    says: str
    """What must be printed, as a pattern; ``{rank}`` is the rank with the fault."""
    places: tuple[str, ...] = ("forward", "data", "between steps")


DIED = rf"rank {{rank}} on {HOST} died|rank {{rank}} \(pipeline rank \d\) failed"
STANDS = r"rank {rank}(, which would know why,)? (does not answer since|stands )"
SAVE = r"could not be saved \(rank {rank}: "
EXPECTED = {
    "exception": Expected(DEATH, rf"rank {{rank}} on {HOST} failed \(\w*Error: |ArithmeticError: chaos"),
    "exit": Expected(DEATH, DIED),
    "segfault": Expected(DEATH, DIED),
    "SIGKILL": Expected(DEATH, DIED),
    "SIGTERM": Expected(DEATH, DIED),
    "SIGSTOP": Expected(STALL, STANDS),
    "interpreter held": Expected(STALL, STANDS),
    "sleep": Expected(STALL, STANDS),
    "pause": Expected(None, ""),
    "slow rank": Expected(None, ""),
    "full disk": Expected(SUCCESS, SAVE, ("save",)),
    "failing save": Expected(SUCCESS, "checkpoints is a file; name a folder for checkpoints", ("save",)),
    "corrupt checkpoint": Expected(None, ""),
}


class Job(NamedTuple):
    """A training, and what happens to it."""

    door: str
    pipeline_ranks: int
    data_ranks: int
    zero_stage: int
    schedule: str
    micro_batches: int
    layers: int
    save_every: int
    fault: str
    rank: int
    step: int
    place: str
    steps: int = STEPS
    hang_timeout: float = HANG_TIMEOUT

    @property
    def ranks(self) -> int:
        return self.pipeline_ranks * self.data_ranks


def random_job(draw: random.Random) -> Job:
    pipeline_ranks, data_ranks = draw.choice([(1, 2), (2, 1), (2, 2), (1, 3)])
    fault = draw.choice(list(EXPECTED))
    return Job(
        door=draw.choice(["pipeline", "pipeline", "plain", "transformers"]),
        pipeline_ranks=pipeline_ranks,
        data_ranks=data_ranks,
        zero_stage=draw.randrange(4),
        schedule=draw.choice(["layered", "layered", "1f1b"]),
        micro_batches=draw.choice([1, 2, 4]),
        layers=draw.choice([2, 4, 5]),
        save_every=draw.choice([1, 2]),
        fault=fault,
        rank=draw.randrange(pipeline_ranks * data_ranks),
        step=draw.randrange(3, STEPS - 1),
        place=draw.choice(EXPECTED[fault].places),
    )


class End(NamedTuple):
    """How a start of a job ended."""

    status: int | None
    """The launcher's; None if it ran on for too long."""
    seconds: float
    """From the fault, or from the start without one, to the end of the last rank that can end."""
    output: str
    left: tuple[int, ...]
    """Processes that remained."""


def start(job: Job, folder: Path, disturbed: bool) -> End:
    """Starts the job under torchrun and waits for its end."""
    told = folder / "job.json"
    told.write_text(json.dumps({**job._asdict(), "fault": job.fault if disturbed else "", "folder": str(folder)}))
    for file in [*folder.glob("rank *"), folder / "fault"]:
        file.unlink(missing_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(job.ranks)]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*launcher, "-m", "ds_lgamp", "run", str(SCRIPT), str(told)],
            **{"cwd": ROOT, "env": {**os.environ, **ON_CPU}, "stdout": output, "stderr": subprocess.STDOUT},
        )
        try:
            seconds = _seconds_to_end(job, folder, process, disturbed)
            # A launcher gives a stopped process time to end, and then kills it.
            wait(lambda: process.poll() is not None, 60)
            status = process.poll()
            wait(lambda: not _alive(folder), 1)
            left = tuple(_alive(folder))
        finally:
            for pid in _alive(folder):
                os.kill(pid, signal.SIGKILL)
            process.kill()
            process.wait()
        output.seek(0)
        return End(status, seconds, output.read(), left)


def _seconds_to_end(job: Job, folder: Path, process: subprocess.Popen, disturbed: bool) -> float:
    """Waits for the end of all ranks that can end, or of the launcher. Returns the seconds since the fault."""
    fails = disturbed and EXPECTED[job.fault].seconds is not None
    if fails:
        wait(lambda: (folder / "fault").exists() or process.poll() is not None, START)
    begun = time.monotonic()
    stopped = job.rank if disturbed and job.fault == "SIGSTOP" else None
    over = lambda: process.poll() is not None or (fails and not _alive(folder, stopped))  # noqa: E731
    wait(over, START + SUCCESS)
    return time.monotonic() - begun


def wait(over: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not over() and time.monotonic() < deadline:
        time.sleep(0.05)


def _alive(folder: Path, except_for: int | None = None) -> list[int]:
    """Returns the processes of ranks that run. One that has ended may wait for its parent."""
    ranks = {int(file.name.removeprefix("rank ")): int(file.read_text() or 0) for file in folder.glob("rank *")}
    return [pid for rank, pid in ranks.items() if pid and rank != except_for and _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] not in "ZX"
    except OSError:
        return False


def complaints(job: Job, folder: Path) -> Iterator[tuple[str, str]]:
    """Runs the job, disturbed and again. Yields what is wrong: its kind, and a description."""
    checkpoints = folder / "checkpoints"
    if job.fault == "failing save":
        checkpoints.write_text("")
    end = start(job, folder, disturbed=True)
    yield from _complaints_about(job, end)
    if job.fault == "failing save":
        checkpoints.unlink()
    yield from _lost(checkpoints)
    if job.fault == "corrupt checkpoint":
        _damage(checkpoints)
    again = start(job._replace(steps=STEPS + 2), folder, disturbed=False)
    if again.status != 0:
        yield ("hang" if again.status is None else "restart"), f"started again, status {again.status}\n{again.output}"
    yield from _lost(checkpoints)
    curve: dict[int, float] = {}
    for line in (folder / "losses").read_text().splitlines():
        step, loss = json.loads(line)
        if abs(curve.setdefault(step, loss) - loss) > 1e-5 * abs(loss):
            yield "loss", f"step {step} had loss {curve[step]}, made again {loss}"
    if list(curve) != list(range(1, STEPS + 3)):
        yield "loss", f"steps {list(curve)}"


def _complaints_about(job: Job, end: End) -> Iterator[tuple[str, str]]:
    expected = EXPECTED[job.fault]
    if end.status is None:
        yield "hang", end.output
    elif (end.status == 0) != (expected.seconds is None):
        yield "status", f"status {end.status}\n{end.output}"
    elif expected.seconds is not None:
        if end.seconds > expected.seconds:
            yield "late", f"{end.seconds:.1f} s after the fault\n{end.output}"
        if not re.search(expected.says.format(rank=job.rank), end.output):
            yield "unnamed", end.output
    if end.left:
        yield "orphans", f"processes {end.left}"


def _lost(checkpoints: Path) -> Iterator[tuple[str, str]]:
    """Yields every published checkpoint that does not load."""
    for state in checkpoints.glob(f"*/{STATE}"):
        try:
            verify(state.parent)
        except CheckpointError as error:
            if state.parent.name != _DAMAGED.get(checkpoints):
                yield "loss", str(error)


_DAMAGED: dict[Path, str] = {}
"""By folder, the checkpoint that the fault itself has damaged."""


def _damage(checkpoints: Path) -> None:
    """Flips a byte of the last checkpoint."""
    last = read_latest(checkpoints)
    assert last is not None, "the job has saved"
    _DAMAGED[checkpoints] = last
    file = next((checkpoints / last).glob("tensors-*/__0_0.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def run(minutes: float, seed: int, out: Path | None) -> int:
    """Runs jobs for so many minutes. Returns how many complaints there were."""
    draw, deadline = random.Random(seed), time.monotonic() + 60 * minutes
    jobs, wrong = Counter[str](), Counter[str]()
    while time.monotonic() < deadline:
        job = random_job(draw)
        jobs[job.fault] += 1
        with tempfile.TemporaryDirectory() as folder:
            found = list(complaints(job, Path(folder)))
        wrong.update(kind for kind, _ in found)
        print(f"{'WRONG' if found else 'ok   '} {job}", flush=True)
        for kind, described in found:
            print(f"{kind}: {described}", flush=True)
    summary = {"seed": seed, "minutes": minutes, "jobs": sum(jobs.values()), "faults": jobs, "complaints": wrong}
    print(json.dumps(summary))
    if out is not None:
        out.write_text(json.dumps(summary, indent=1) + "\n")
    return sum(wrong.values())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m testing.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file for the summary, as JSON")
    options = parser.parse_args()
    sys.exit(1 if run(options.minutes, options.seed, options.out) else 0)


if __name__ == "__main__":
    main()
