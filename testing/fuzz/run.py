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


def run_trainings(count: int, seed: int) -> Tally:
    """Runs the cases of one rank, then those of two ranks, many in the same processes."""
    tally = Tally()
    cases = [(case, trainings.of_case(case)) for case in range(seed, seed + count)]
    for world_size in (1, 2):
        left = [each for each in cases if each[1].world_size == world_size]
        while left:
            outcomes = _trained(world_size, left[:ENGINES])
            for case, outcome in outcomes:
                tally.add(case, outcome)
            left = left[len(outcomes) :]
    return tally


def _trained(world_size: int, cases: list[tuple[int, trainings.Training]]) -> list[tuple[int, Outcome]]:
    """Returns the outcomes of the first of these cases, up to one that ended the processes."""
    with tempfile.TemporaryDirectory() as name:
        try:
            run_on_ranks(world_size, trainings.run_cases, cases, name, seconds=LIMIT)
        except AssertionError as error:
            end = str(error)
        else:
            end = ""
        by_rank = [trainings.outcomes(Path(name), rank, end) for rank in range(world_size)]
    known = [case for case, _ in cases if any(case in outcomes for outcomes in by_rank)]
    return [(case, trainings.worst([of_rank[case] for of_rank in by_rank if case in of_rank])) for case in known]


RUNS = {
    "configs": run_configs,
    "programs": run_programs,
    "checkpoints": run_checkpoints,
    "trainings": run_trainings,
}
