"""The record of test runs with other versions, and its table."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from testing.launching import ROOT
from testing.markdown import table

RECORDED = ROOT / "benchmarks" / "results" / "versions.json"
"""The recorded runs that docs/compatibility.md shows."""
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.8", "2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
DEFAULT_SET = "default set"


@dataclass(frozen=True)
class TestRun:
    """One run of tests with one combination of versions."""

    __test__ = False

    python: str
    torch: str
    deepspeed: str
    megatron_core: str
    transformers: str
    tests: str
    """The arguments of pytest; :data:`DEFAULT_SET` if there were none."""
    passed: int
    skipped: int
    failed: list[str]
    """Tests that failed, also when they ran once more by themselves."""
    passed_alone: list[str]
    """Tests that failed, and passed when they ran once more by themselves."""
    seconds: float
    date: str
    commit: str

    @property
    def key(self) -> tuple[str, ...]:
        return self.python, self.torch, self.deepspeed, self.megatron_core, self.transformers, self.tests


def read(path: Path = RECORDED) -> list[TestRun]:
    return [TestRun(**run) for run in json.loads(path.read_text())["runs"]] if path.exists() else []


def add(run: TestRun, path: Path = RECORDED) -> None:
    """Writes ``run`` into the record, in place of an earlier run of the same tests with the same versions."""
    runs = {**{other.key: other for other in read(path)}, run.key: run}
    ordered = sorted(runs.values(), key=lambda run: [*map(_numbers, run.key[:-1]), run.tests])
    lines = ",\n".join(f"  {json.dumps(asdict(run))}" for run in ordered)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"runs": [\n{lines}\n]}}\n')


def page_block(path: Path = RECORDED) -> str:
    """Returns the part of docs/compatibility.md about versions: a row for every run, and what was not run."""
    runs = read(path)
    ran = {(_short(run.python), _short(run.torch)) for run in runs if run.tests == DEFAULT_SET}
    missing = {torch: [python for python in PYTHONS if (python, torch) not in ran] for torch in TORCHES}
    listed = "; ".join(f"torch {torch} with {', '.join(pythons)}" for torch, pythons in missing.items() if pythons)
    return f"{markdown(runs)}\n\nThe default set was not run with these versions of Python: {listed or 'none'}."


def markdown(runs: Iterable[TestRun]) -> str:
    header = ["Python", "torch", "DeepSpeed", "Megatron-core", "transformers", "tests", "result", "date"]
    return table(header, [[*run.key, _result(run), run.date] for run in runs])


def _result(run: TestRun) -> str:
    parts = [f"{run.passed} passed"]
    parts += [f"{len(run.passed_alone)} of them when run once more"] if run.passed_alone else []
    parts += [f"**{len(run.failed)} failed**: {', '.join(run.failed)}"] if run.failed else []
    return "; ".join(parts)


def _short(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.partition("+")[0].split(".") if part.isdigit()]
