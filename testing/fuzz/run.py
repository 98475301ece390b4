"""Runs the cases of a subject. A case depends on its number alone, so that each can be run again by itself."""

import tempfile
from pathlib import Path
from random import Random

from testing.checkpoints import content, written
from testing.fuzz import checkpoints, configs, programs, trainings
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
    """Runs the cases in fresh processes, because each engine leaves threads."""
    tally, case, end = Tally(), seed, seed + count
    with tempfile.TemporaryDirectory() as name:
        progress = Path(name) / "case"
        while case < end:
            together = min(ENGINES, end - case)
            try:
                (outcomes,) = run_on_ranks(1, configs.run_cases, case, together, str(progress), seconds=LIMIT)
            except AssertionError as error:
                # The process hung or died: the case is a defect, and the cases after it start anew.
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


def run_trainings(count: int, seed: int) -> Tally:
    tally, cases = Tally(), {case: trainings.of_case(case) for case in range(seed, seed + count)}
    for case, outcome in train_all(cases).items():
        text = f"{cases[case].description}: {outcome.text}" if outcome.kind.startswith("defect") else outcome.text
        tally.add(case, outcome._replace(text=text))
    return tally


def train_all(cases: dict[int, trainings.Training], limit: int = trainings.LIMIT) -> dict[int, Outcome]:
    """Runs trainings, many in the same processes. The trainings after one that ended its processes start anew.

    Args:
        cases: by number.
        limit: seconds of one training.
    """
    outcomes: dict[int, Outcome] = {}
    for world_size in sorted({training.world_size for training in cases.values()}):
        left = [(case, training) for case, training in cases.items() if training.world_size == world_size]
        while left:
            done = _train_some(world_size, left[:ENGINES], limit)
            outcomes |= done
            left = [each for each in left if each[0] not in done]
    return outcomes


def _train_some(world_size: int, cases: list[tuple[int, trainings.Training]], limit: int) -> dict[int, Outcome]:
    """Returns the outcomes of these cases, up to one that ended the processes."""
    with tempfile.TemporaryDirectory() as name:
        try:
            run_on_ranks(world_size, trainings.run_cases, cases, name, limit, seconds=limit * len(cases))
        except AssertionError as error:
            end = str(error)
        else:
            end = ""
        found = {case: trainings.outcome_of(Path(name), world_size, case, end) for case, _ in cases}
    outcomes = {case: outcome for case, outcome in found.items() if outcome is not None}
    if not outcomes:
        raise AssertionError(f"no training began: {end}")
    return outcomes


RUNS = {
    "configs": run_configs,
    "programs": run_programs,
    "checkpoints": run_checkpoints,
    "trainings": run_trainings,
}
