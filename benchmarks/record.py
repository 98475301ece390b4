"""Records of benchmarks: rows and targets, as JSON under benchmarks/results."""

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from operator import truediv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OURS = "ds_lgamp"
"""The contender of this project. A name may continue after it."""
TYPICAL = f"{OURS}, ZeRO-3, 2 resident"
"""A block without settings at ZeRO stage 3."""
REPETITIONS = 5
PACKAGES = ("torch", "deepspeed")
PART, PARTS = "part", "parts"
"""Keys of a row's configuration and of the machine, in records of benchmarks whose parts may run alone."""

Config = dict[str, int | float | str]
"""The configuration of a row, such as {"pipeline_ranks": 4, "micro_batches": 8}."""


@dataclass(frozen=True)
class Row:
    """One metric of one contender."""

    contender: str
    config: Config
    metric: str
    median: float
    spread: float
    """Largest minus smallest repetition."""
    unit: str


MET, BELOW_FLOOR, IN_SPREAD, MISSED = "yes", "floor", "spread", "no"


@dataclass(frozen=True)
class Target:
    """A target; it is met if ``value`` is at most ``limit``."""

    text: str
    value: float
    limit: float
    floor: float | None = None
    """The same without this project's engine, or in the simulated order, which no engine can beat."""
    spread: float = 0.0
    """Half of the spread of ``value``."""

    @property
    def met(self) -> bool:
        return self.value <= self.limit

    @property
    def verdict(self) -> str:
        """``MET`` or ``MISSED``; ``BELOW_FLOOR`` if the floor misses the limit, too; ``IN_SPREAD`` if the miss is no
        larger than the spread."""
        if self.met:
            return MET
        if self.floor is not None and self.floor > self.limit:
            return BELOW_FLOOR
        return IN_SPREAD if self.value - self.spread <= self.limit else MISSED


@dataclass(frozen=True)
class Failure:
    """A contender that could not be measured, and the reason."""

    contender: str
    config: Config
    reason: str


@dataclass
class Record:
    """One run of a benchmark."""

    name: str
    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def add(self, contender: str, config: Config, metric: str, samples: Sequence[float], unit: str) -> None:
        """Enters the median and the spread of ``samples``, given in ``unit``."""
        spread = max(samples) - min(samples)
        self.rows.append(Row(contender, config, metric, statistics.median(samples), spread, unit))

    def aim(
        self, text: str, value: float, limit: float, *, floor: float | None = None, samples: Sequence[float] = ()
    ) -> None:
        """Enters a target: ``value`` must be at most ``limit``. The spread is that of ``samples``."""
        self.targets.append(Target(text, value, limit, floor, (max(samples) - min(samples)) / 2 if samples else 0.0))

    def compare(
        self, text: str, ours: Sequence[float], theirs: Sequence[float], limit: float, *, floor: float | None = None
    ) -> None:
        """Enters a target: the quotient of two medians must be at most ``limit``. The spread is that of the quotients
        by round: contenders take turns, so samples of a round have the same load."""
        value = statistics.median(ours) / statistics.median(theirs)
        self.aim(text, value, limit, floor=floor, samples=list(map(truediv, ours, theirs)))

    def fail(self, contender: str, config: Config, reason: str) -> None:
        """Enters that ``contender`` could not be measured."""
        self.failures.append(Failure(contender, config, reason))

    def lack_network(self, lack: str, reason: object) -> None:
        """Enters, and writes to stderr, that no slow network was available: what is missing and why."""
        self.machine["network"] = f"{lack}: {reason}"
        print(f"{self.name}: {self.machine['network']}", file=sys.stderr)

    def to_json(self) -> str:
        """Formats the record with one row per line. Omits an empty list of failures."""
        parts = [f'"name": {json.dumps(self.name)}', f'"machine": {json.dumps(self.machine)}']
        for key in ("rows", "targets", "failures"):
            items = getattr(self, key)
            if items or key != "failures":
                lines = ",\n".join(f"  {json.dumps(asdict(item))}" for item in items)
                parts.append(f'"{key}": [\n{lines}\n]')
        return "{" + ",\n".join(parts) + "}\n"


def begin(name: str) -> Record:
    """Returns an empty record with the machine's current state."""
    return Record(name, machine())


def finish(record: Record, part: str | None = None) -> None:
    """Adds the load at the end and writes the record to its file. One of a single ``part`` takes the place of that part
    in the file."""
    record.machine["load_after"] = load()
    if part is not None:
        record = with_part(record, part)
    (RESULTS / f"{record.name}.json").write_text(record.to_json())


def with_part(record: Record, part: str) -> Record:
    """Returns the recorded run with ``record`` in place of its ``part``. Rows and failures have it in their
    configuration under ``PART``; texts of targets begin with it.

    Each part keeps a description of the machine of its own, because parts run at different times.
    """
    earlier = read(record.name) if is_recorded(record.name) else Record(record.name, {})
    machines = {name: own for name, own in earlier.machine.get(PARTS, {}).items() if name != part}
    return Record(
        record.name,
        {**record.machine, PARTS: {**machines, part: dict(record.machine)}},
        [row for row in earlier.rows if row.config.get(PART) != part] + record.rows,
        [target for target in earlier.targets if not target.text.startswith(f"{part}:")] + record.targets,
        [failure for failure in earlier.failures if failure.config.get(PART) != part] + record.failures,
    )


def is_recorded(name: str) -> bool:
    """Whether a record exists. One that needs an accelerator may be missing."""
    return (RESULTS / f"{name}.json").exists()


def read(name: str) -> Record:
    """Reads the recorded run of a benchmark.

    Raises SystemExit with the command that makes it if there is none.
    """
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{path.name} is missing; make it with python -m benchmarks run {name}")
    content = json.loads(path.read_text())
    content["rows"] = [Row(**row) for row in content["rows"]]
    content["targets"] = [Target(**target) for target in content["targets"]]
    content["failures"] = [Failure(**failure) for failure in content.get("failures", [])]
    return Record(**content)


def machine() -> dict[str, Any]:
    """Describes cores, processor, system, versions, commit, and the load average before the run."""
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "commit": _commit(),
        "load_before": load(),
    }


def _commit() -> str:
    """The commit, marked as dirty if code has changed. Pages and results are no part of what is measured."""
    changed = _output_of("git", "status", "--porcelain", "--", "*.py", "*.toml", "*.sh")
    commit = _output_of("git", "rev-parse", "--short", "HEAD")
    return f"{commit or 'unknown'}{'-dirty' if changed else ''}"


def _processor() -> str:
    """The processor's name as Linux reports it, else its architecture."""
    names = _output_of("sh", "-c", "grep -m 1 'model name' /proc/cpuinfo").partition(":")[2].strip()
    return names or platform.machine()


def _output_of(*command: str) -> str:
    """Output of a command; empty on a machine that lacks it."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def load() -> float:
    """The load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def write_json(path: Path, content: Any) -> None:
    """Writes JSON atomically, because the process may be stopped at any time."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)
