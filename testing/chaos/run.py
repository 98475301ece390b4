"""Runs random jobs for a while."""

import json
import random
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from testing.chaos.jobs import Job, random_job
from testing.chaos.judge import Curves, Judged, judge
from testing.chaos.record import Run
from testing.namespaces import NetworkUnavailable, throttled_network


def run(minutes: float, seed: int, commit: str) -> Run:
    """Runs jobs, one after another, and tells of each. Begins none that may take longer than ``minutes`` in all."""
    begun, longest, curves = time.monotonic(), 0.0, Curves()
    draw, left_out = random.Random(seed), _impossible()
    for fault, reason in left_out.items():
        print(f"left out: {fault}: {reason}", flush=True)
    jobs: dict[str, Counter[str]] = defaultdict(Counter)
    complaints: dict[str, Counter[str]] = defaultdict(Counter)
    while not jobs or time.monotonic() - begun + longest < 60 * minutes:
        started = time.monotonic()
        job = random_job(draw, left_out)
        judged = tell(job, curves)
        longest = max(longest, time.monotonic() - started)
        jobs[job.fault][job.door] += judged.met
        complaints[job.fault].update({complaint.kind for complaint in judged.complaints})
    spent = round((time.monotonic() - begun) / 60, 1)
    wrong = {fault: dict(kinds) for fault, kinds in complaints.items() if kinds}
    return Run(commit, seed, spent, {fault: dict(doors) for fault, doors in jobs.items()}, wrong, left_out)


def tell(job: Job, curves: Curves) -> Judged:
    """Runs a job and prints how it ended, with what repeats it."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        judged = judge(job, Path(folder), curves)
    word = "WRONG" if judged.complaints else "ok   " if judged.met else "unmet"
    print(f"{word} {time.monotonic() - begun:.0f} s {json.dumps(job._asdict())}", flush=True)
    for kind, text in judged.complaints:
        print(f"{kind}: {text}", flush=True)
    return judged


def _impossible() -> dict[str, str]:
    """Returns the faults that this machine does not allow, and why."""
    try:
        with throttled_network(1, "1gbit"):
            return {}
    except NetworkUnavailable as reason:
        return {"dead link": str(reason)}
