"""Judges how a job ended that met a fault, and whether it goes on as if nothing had happened."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.folder import STATE, read_latest
from ds_lgamp.checkpoint.whole import verify
from testing.chaos.faults import FAULTS
from testing.chaos.jobs import Job
from testing.chaos.started import End, start

HANG, LATE, STATUS, UNNAMED, WRONG, REMAINS, LOST, RESTART, CURVE = (
    "hang",
    "late",
    "status",
    "unnamed",
    "wrong name",
    "remains",
    "lost checkpoint",
    "restart",
    "loss curve",
)
"""Kinds of complaints."""
TOLERANCE = 1e-4
"""Of losses. Layouts add in other orders, and Adam's small steps enlarge what rounding leaves."""


class Complaint(NamedTuple):
    """What is wrong with an end."""

    kind: str
    text: str


class Judged(NamedTuple):
    """A job after its two starts."""

    met: bool
    """Whether its fault happened."""
    complaints: list[Complaint]


Curves = dict[tuple[str | int, ...], dict[int, float]]
"""Losses by step, of jobs that must have the same."""


def judge(job: Job, folder: Path, curves: Curves) -> Judged:
    """Runs the job in an empty ``folder``, disturbed and again. Enters what is new into ``curves``."""
    checkpoints = folder / "checkpoints"
    if job.fault == "failing save":
        checkpoints.write_text("")
    end = start(job, folder, disturbed=True)
    if job.fault == "failing save":
        # Which was made above, for the first save of all.
        end = end._replace(met=True)
    found = [*of_end(job, end)]
    if job.fault == "failing save":
        checkpoints.unlink()
    damaged = None
    if job.goes_on:
        found += lost(checkpoints)
        if job.fault == "corrupt checkpoint":
            damaged = damage(checkpoints, DAMAGES[job.step % len(DAMAGES)])
        found += _of_restart(job, folder, curves.setdefault(job.alike, {}))
        found += lost(checkpoints, damaged)
    return Judged(end.met, found)


def of_end(job: Job, end: End) -> Iterator[Complaint]:
    """Yields what is wrong with the ``end`` of the disturbed start."""
    fault = FAULTS[job.fault]
    fails = end.met and fault.seconds is not None
    if end.status is None:
        yield Complaint(HANG, end.output)
    elif (end.status != 0) != fails:
        yield Complaint(STATUS, f"status {end.status}\n{end.output}")
    elif fails:
        assert fault.seconds is not None
        if end.seconds > fault.seconds + end.starved:
            yield Complaint(LATE, f"{end.seconds:.1f} s after the fault, {end.starved:.1f} starved\n{end.output}")
        if not re.search(fault.says.format(rank=job.rank, other=job.other), end.output):
            yield Complaint(UNNAMED, end.output)
    guilty = {job.rank, job.other} if job.fault == "dead link" else {job.rank} if fails and fault.says else set()
    if not named(end.output) <= guilty:
        yield Complaint(WRONG, f"{sorted(named(end.output))}\n{end.output}")
    if end.left:
        yield Complaint(REMAINS, "\n".join(end.left))


def named(output: str) -> set[int]:
    """Returns the ranks that the last words of ranks blame."""
    blamed: set[int] = set()
    for verdict in re.findall(r"^ds_lgamp: (rank \d+ .*); this rank, \d+ on \S+, ends ", output, re.MULTILINE):
        own = re.match(r"rank (\d+) on \S+ (died|failed )", verdict)
        last = verdict.rpartition("; ")[2]
        link = re.search(r"between ranks (\d+) and (\d+) is down$", last)
        if own:
            blamed.add(int(own[1]))
        elif link:
            blamed |= {int(link[1]), int(link[2])}
        else:
            blamed |= {int(rank) for rank in re.findall(r"^rank (\d+)", last)}
    return blamed


def lost(checkpoints: Path, damaged: str | None = None) -> Iterator[Complaint]:
    """Yields every published checkpoint that does not load. The fault itself has ``damaged`` one."""
    for state in checkpoints.glob(f"*/{STATE}"):
        try:
            verify(state.parent)
        except CheckpointError as error:
            if state.parent.name != damaged:
                yield Complaint(LOST, str(error))


def damage(checkpoints: Path, harm: Callable[[Path], None]) -> str:
    """Does ``harm`` to the last checkpoint, and returns its name."""
    last = read_latest(checkpoints)
    assert last is not None, "the job has saved"
    harm(checkpoints / last)
    return last


def _flipped(checkpoint: Path) -> None:
    file = _numbers(checkpoint)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _cut(checkpoint: Path) -> None:
    file = _numbers(checkpoint)
    file.write_bytes(file.read_bytes()[:-1])


def _numbers(checkpoint: Path) -> Path:
    return next(checkpoint.glob("tensors-*/__0_0.distcp"))


DAMAGES: Sequence[Callable[[Path], None]] = (
    _flipped,
    _cut,
    lambda checkpoint: _numbers(checkpoint).unlink(),
    lambda checkpoint: (checkpoint / STATE).unlink(),
)
"""What can happen to the files of a checkpoint."""


def _of_restart(job: Job, folder: Path, known: dict[int, float]) -> Iterator[Complaint]:
    """Starts the job again, undisturbed, for two steps more, maybe at another layout. Yields what is wrong."""
    steps = 2 + max([job.steps, *(step for step, _ in _losses(folder))])
    again = start(job.resumed._replace(steps=steps), folder, disturbed=False)
    if again.status != 0:
        yield Complaint(HANG if again.status is None else RESTART, f"status {again.status}\n{again.output}")
        return
    yield from of_curve(_losses(folder), steps, known)


def of_curve(losses: list[tuple[int, float]], steps: int, known: dict[int, float]) -> Iterator[Complaint]:
    """Yields which of ``steps`` are missing, and whose loss is not that of the ``known`` curve. Enters new ones."""
    for step, loss in losses:
        if abs(known.setdefault(step, loss) - loss) > TOLERANCE * abs(loss):
            yield Complaint(CURVE, f"step {step} has loss {loss}, elsewhere or before {known[step]}")
    if list(dict.fromkeys(step for step, _ in losses)) != list(range(1, steps + 1)):
        yield Complaint(CURVE, f"steps {[step for step, _ in losses]}")


def _losses(folder: Path) -> list[tuple[int, float]]:
    file = folder / "losses"
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
