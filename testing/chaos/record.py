"""The record of all runs, and its table in docs/failures.md."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from testing import ROOT
from testing.chaos.faults import DOORS, FAULTS
from testing.chaos.judge import HANG, LOST, UNNAMED, WRONG
from testing.markdown import table

RECORDED = ROOT / "benchmarks" / "results" / "chaos.json"
"""The recorded runs that docs/failures.md shows."""


class Run(NamedTuple):
    """One run of ``python -m testing.chaos``."""

    commit: str
    seed: int
    minutes: float
    jobs: dict[str, dict[str, int]]
    """How many, by fault and door, of those in which the fault happened."""
    complaints: dict[str, dict[str, int]]
    """How many jobs had one, by fault and kind."""
    left_out: dict[str, str]
    """Faults that this machine does not allow, and why."""


def read(path: Path = RECORDED) -> list[Run]:
    return [Run(**run) for run in json.loads(path.read_text())["runs"]] if path.exists() else []


def add(run: Run, path: Path = RECORDED) -> None:
    """Appends ``run`` to the record."""
    lines = ",\n".join(f"  {json.dumps(each._asdict())}" for each in [*read(path), run])
    path.write_text(f'{{"runs": [\n{lines}\n]}}\n')


def page_block(path: Path = RECORDED) -> str:
    """Returns the part of docs/failures.md about chaos: jobs of all runs by fault and door, and how they ended."""
    runs = read(path)
    jobs, complaints = _sum(run.jobs for run in runs), _sum(run.complaints for run in runs)
    rows: list[list[Any]] = []
    for fault in FAULTS:
        count, wrong = jobs[fault].total(), complaints[fault]
        misnamed = wrong[UNNAMED] + wrong[WRONG]
        named = f"{count - misnamed} of {count}" if FAULTS[fault].says else ""
        others = ", ".join(f"{kind}: {number}" for kind, number in wrong.items() if kind not in (UNNAMED, WRONG))
        rows.append([fault, *(f"{jobs[fault][door]}" for door in DOORS), named, others])
    return f"{_summary(runs)}\n\n{table(['fault', *DOORS, 'named rightly', 'else wrong'], rows, numbers_from=1)}"


def _summary(runs: list[Run]) -> str:
    jobs, complaints = _sum(run.jobs for run in runs), _sum(run.complaints for run in runs)
    total = sum(counted.total() for counted in jobs.values())
    to_name = sum(counted.total() for fault, counted in jobs.items() if FAULTS[fault].says)
    kinds: Counter[str] = sum(complaints.values(), Counter())
    named = to_name - kinds[UNNAMED] - kinds[WRONG]
    minutes = sum(run.minutes for run in runs)
    share = f" ({named / to_name:.1%})" if to_name else ""
    return (
        f"{total} jobs in {minutes:.0f} minutes; hangs: {kinds[HANG]}, lost checkpoints: {kinds[LOST]}; of {to_name} "
        f"faults that must be named, {named}{share} were blamed on the right rank and on no other."
    )


def _sum(counted: Iterable[dict[str, dict[str, int]]]) -> dict[str, Counter[str]]:
    """Adds up numbers by two names."""
    total: dict[str, Counter[str]] = {fault: Counter() for fault in FAULTS}
    for of_run in counted:
        for fault, numbers in of_run.items():
            total[fault].update(numbers)
    return total
