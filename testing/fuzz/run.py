"""Runs the cases of a subject. A case depends on its number alone, so that each can be run again by itself."""

import tempfile
from pathlib import Path
from random import Random

from testing.checkpoints import content, written
from testing.fuzz import checkpoints, configs, programs
from testing.fuzz.outcome import Outcome, Tally
from testing.ranks import run_on_ranks

ENGINES = 40
"""Configurations of one process."""
LIMIT = 240.0
"""Seconds of one process."""


def run_programs(count: int, seed: int) -> Tally:
    tally = Tally()
    for case in range(seed, seed + count):
        tally.add(case, programs.run_case(Random(case)))
    return tally


def run_checkpoints(count: int, seed: int) -> Tally:
    tally = Tally()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        original = written(folder / "original")
        expected = content(checkpoints.read_whole(original))
        for case in range(seed, seed + count):
            tally.add(case, checkpoints.run_case(Random(case), original, expected, folder))
    return tally


def run_configs(count: int, seed: int) -> Tally:
    """Runs the cases in fresh processes, because each engine leaves threads behind."""
    tally, case, end = Tally(), seed, seed + count
    with tempfile.TemporaryDirectory() as name:
        progress = Path(name) / "case"
        while case < end:
            together = min(ENGINES, end - case)
            try:
                (outcomes,) = run_on_ranks(1, configs.run_cases, case, together, str(progress), seconds=LIMIT)
            except AssertionError as error:
                # The process hung or died: the case is a defect, and those after it start anew.
                reached = int(progress.read_text())
                if reached > case:
                    (outcomes,) = run_on_ranks(1, configs.run_cases, case, reached - case, str(progress), seconds=LIMIT)
                    for number, outcome in outcomes:
                        tally.add(number, outcome)
                text = f"{configs.random_config(Random(reached))}: {str(error).splitlines()[-1]}"
                tally.add(reached, Outcome("defect: no end", text))
                case = reached + 1
                continue
            for number, outcome in outcomes:
                tally.add(number, outcome)
            case += together
    return tally


RUNS = {"configs": run_configs, "programs": run_programs, "checkpoints": run_checkpoints}
