"""Runs parts, each in its own processes, and keeps what they found in a folder."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_day import Part
from benchmarks.record import ROOT, write_json
from testing.launching import ON_CPU

PASSED, FAILED, NOT_RUN, RUNNING = "passed", "failed", "not run", "running"
SUMMARY = "summary.json"
RESERVE = 5
"""Seconds at the end of a budget for what follows the last part."""
SHORTEST = 60
"""Seconds in which a part is worth a start."""
TAIL = 4000
"""Characters of a failed part's output that are kept."""

Report = dict[str, Any]
"""A part's file: ``part``, ``status``, ``reason``, ``seconds``, ``dry_run``, ``machine``, ``results`` by name and,
unless it passed, ``output``, its end."""


def run_parts(
    parts: Sequence[Part], out: Path, seconds: float | None = None, dry_run: bool = False, only: str | None = None
) -> list[Report]:
    """Runs every part that has not passed yet. Returns all reports that there are.

    What was never tried comes first.

    Args:
        parts: in running order.
        out: folder of the reports, one file per part, of their outputs, and of their summary, which names the part that
            runs.
        seconds: budget for all parts. A part is stopped before the budget is over, and keeps what it has found. It is
            not started if less than a minute is left for it, unless it needs no more.
        dry_run: whether to run on the CPU.
        only: name of the part to run; None for all.
    """
    out.mkdir(parents=True, exist_ok=True)
    deadline = float("inf") if seconds is None else time.monotonic() + seconds
    reports = {part: kept(part, out) for part in parts}
    for part in sorted(parts, key=lambda part: bool(reports[part])):
        left = deadline - time.monotonic() - RESERVE
        if only not in (None, part.name):
            continue
        if reports[part].get("status") == PASSED and reports[part]["dry_run"] == dry_run:
            print(f"{part.name}: passed before", file=sys.stderr)
        elif left < min(part.seconds, SHORTEST):
            reason = f"takes up to {part.seconds} s, and {max(left, 0):.0f} s are left"
            reports[part] = reports[part] or {"part": part.name, "status": NOT_RUN, "reason": reason, "results": {}}
        else:
            limited = part._replace(seconds=int(min(part.seconds, left)))
            print(f"{part.name}: at most {limited.seconds} s", file=sys.stderr)
            reports[part] = {"part": part.name, "status": RUNNING, "reason": "", "results": {}}
            _summarise(reports, out)
            reports[part] = run_part(limited, out, dry_run)
        _summarise(reports, out)
    return [report for report in reports.values() if report]


def _summarise(reports: dict[Part, Report], out: Path) -> None:
    write_json(out / SUMMARY, {"parts": [report for report in reports.values() if report]})


def kept(part: Part, out: Path) -> Report:
    """Returns the report of an earlier run; empty if there is none."""
    path = out / f"{part.name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def run_part(part: Part, out: Path, dry_run: bool) -> Report:
    """Runs a part in its own process group, of which nothing is left afterwards."""
    path = out / f"{part.name}.json"
    path.unlink(missing_ok=True)
    started = time.monotonic()
    # A file with a name outlives this process.
    with (out / f"{part.name}.log").open("w+", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_day", part.module, str(out.absolute())],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **(ON_CPU if dry_run else {}), "PYTHONUNBUFFERED": "1"},
            preexec_fn=os.setpgrp,
        )
        try:
            ended = f"exit status {process.wait(part.seconds)}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {part.seconds} s"
        finally:
            _end_group(process)
        output.seek(0)
        written = output.read()
    found = kept(part, out)
    results = found.get("results", {})
    status, reason = verdict(results, ended)
    report = {
        **{"part": part.name, "status": status, "reason": reason, "seconds": round(time.monotonic() - started, 1)},
        **{"dry_run": dry_run, "machine": found.get("machine"), "results": results},
        **({} if status == PASSED else {"output": written[-TAIL:]}),
    }
    write_json(path, report)
    return report


def _end_group(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def verdict(results: dict[str, dict[str, Any]], ended: str) -> tuple[str, str]:
    """Returns a part's status and the reason, by what it found and how its process ended."""
    reasons = {
        status: [f"{name}: {found[key]}" for name, found in results.items() if key in found]
        for status, key in ((FAILED, "failure"), (NOT_RUN, "not run"))
    }
    if ended != "exit status 0":
        reasons[FAILED].append(ended)
    status = next((status for status, found in reasons.items() if found), PASSED)
    return status, "; ".join(reasons.get(status, []))


def as_table(reports: Sequence[Report]) -> str:
    """Parts in columns, each with what went wrong or could not run."""
    rows = [("part", "status", "seconds", "results", "reason")]
    for report in reports:
        seconds = f"{report['seconds']:.0f}" if "seconds" in report else ""
        rows.append((report["part"], report["status"], seconds, str(len(report["results"])), report["reason"]))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
