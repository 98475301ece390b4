"""Outcomes of runs of public code, and their table."""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from testing.launching import ROOT
from testing.markdown import table

RECORDED = ROOT / "benchmarks" / "results" / "public.json"
"""The recorded run that docs/compatibility.md shows."""

T = TypeVar("T")
BAD = ("differs", "failed")
"""First words of results that make the whole run fail."""
WITHOUT_BLOCK = "without a block: "
# What a trace says of its folder, and a rank of another's end, is none.
_NO_REFUSAL = r"steps \d+ to \d+ are recorded|rank \d+ on \S+ (?:failed|died)"
_REFUSAL = re.compile(rf"^(?:\[\w+\]: ?)?(?:ds_lgamp: |(?:\w+\.)*ConfigError: )(?!{_NO_REFUSAL})(.+)", re.MULTILINE)
# Skips torchrun's own error, which only says that a rank has failed.
_ERROR = re.compile(
    r"^(?:\[\w+\]: ?)?((?!torch\.distributed\.elastic)(?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b.*)", re.MULTILINE
)


@dataclass(frozen=True)
class Outcome:
    """A row of the table."""

    material: str
    version: str
    """The commit of the tree, or the version of the package; "unknown" if it is no git checkout."""
    configuration: str
    result: str
    seconds: float

    @property
    def bad(self) -> bool:
        return self.result.startswith(BAD)


@dataclass(frozen=True)
class Case:
    """A configuration to run. ``run`` returns its result, or raises AssertionError with a process's output."""

    configuration: str
    run: Callable[[], str]


def outcomes(material: str, version: str | None, cases: Sequence[Case], lack: str) -> Iterable[Outcome]:
    """Runs ``cases`` of this ``version`` of ``material`` in order. Without one yields one outcome with the reason
    ``lack``."""
    if version is None:
        yield Outcome(material, "", "", f"skipped: {lack}", 0.0)
        return
    for case in cases:
        start = time.monotonic()
        try:
            result = case.run()
        except AssertionError as error:
            result = told_by(str(error))
        yield Outcome(material, version, case.configuration, result, round(time.monotonic() - start, 1))


def told_by(output: str) -> str:
    """Returns the result of a run that failed with this ``output``."""
    whose = WITHOUT_BLOCK if output.startswith(WITHOUT_BLOCK) else ""
    refusal = _REFUSAL.search(output)
    if refusal:
        return f"refused: {whose}{refusal[1].strip()}"
    errors = _ERROR.findall(output)
    return f"failed: {whose}{errors[0].strip() if errors else output.strip().splitlines()[-1]}"


def without_block(train: Callable[[], T]) -> T:
    """Returns the result of ``train``. If it fails, marks the error as one without a block."""
    try:
        return train()
    except AssertionError as error:
        raise AssertionError(f"{WITHOUT_BLOCK}{error}") from None


def compared(losses: Sequence[float], stock: Sequence[float], tolerance: float = 1e-5) -> str:
    """Compares the losses of two trainings with the relative ``tolerance``."""
    if not stock or len(losses) != len(stock):
        return f"differs: {len(losses)} losses, stock has {len(stock)}"
    differences = [abs(own - other) / (abs(other) or 1.0) for own, other in zip(losses, stock)]
    # This form also catches NaN, for which every comparison is false.
    apart = [difference for difference in differences if not difference <= tolerance]
    if apart:
        return f"differs: by {apart[0]:.1e}"
    difference = max(differences)
    return f"equal within {difference:.0e}" if difference else "equal"


def commit_of(tree: Path) -> str:
    """Returns the short commit that ``tree`` is checked out at."""
    found = subprocess.run(["git", "-C", str(tree), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def markdown(found: Iterable[Outcome]) -> str:
    rows = [
        [outcome.material, outcome.version, outcome.configuration, outcome.result, f"{outcome.seconds:.0f}"]
        for outcome in found
    ]
    return table(["material", "version", "configuration", "result", "seconds"], rows, numbers_from=4)


def to_json(found: Iterable[Outcome], command: str, versions: dict[str, str]) -> str:
    """Formats the outcomes with one per line."""
    lines = ",\n".join(f"  {json.dumps(asdict(outcome))}" for outcome in found)
    return f'{{"command": {json.dumps(command)},\n"versions": {json.dumps(versions)},\n"outcomes": [\n{lines}\n]}}\n'


def by_stage(found: Iterable[Outcome]) -> str:
    """Returns a table that has one row for all stages of a configuration, whose name ends with the stage."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for outcome in found:
        name, _, stage = outcome.configuration.rpartition(", ZeRO-")
        rows.setdefault((outcome.version, name), {})[stage] = outcome.result
    stages = "0123"
    body = [[*row, *(results.get(stage, "") for stage in stages)] for row, results in rows.items()]
    return table(["version", "configuration", *(f"ZeRO-{stage}" for stage in stages)], body)


def page_block(path: Path = RECORDED, tabled: Callable[[Iterable[Outcome]], str] = markdown) -> str:
    """Returns the part of docs/compatibility.md about the recorded run: command, versions and what ``tabled`` makes of
    the outcomes."""
    if not path.exists():
        return f"Not recorded yet: `python -m testing.public --json {path.relative_to(ROOT)}`."
    recorded = json.loads(path.read_text())
    versions = ", ".join(f"{package} {version}" for package, version in recorded["versions"].items())
    rows = tabled(Outcome(**outcome) for outcome in recorded["outcomes"])
    return f"`{recorded['command']}`, {versions}:\n\n{rows}"
