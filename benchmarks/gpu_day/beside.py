"""Trainings of a part beside each other: tokens per second, peak memory, and losses that have to agree."""

import time
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Any

from benchmarks.gpt.contenders import Contender
from benchmarks.gpt.sizes import GptSize
from benchmarks.gpu import NOT_RUN, Trial, deviation, measure_trials
from benchmarks.record import OURS

SECONDS = 450
"""For all trainings of a part together."""

Trials = Mapping[str, Trial]


def compared(
    trainings: Iterable[tuple[Contender, Trials]], seconds: float = SECONDS
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Trains one contender after another, each in its own process. Yields what was found by contender and trial. Losses
    of a size have to be those of the first training of that size: all have the same model."""
    deadline = time.monotonic() + seconds
    expected: dict[GptSize, list[float]] = {}
    for contender, trials in trainings:
        for name, found in measure_trials(contender, trials, deadline, limit=seconds).items():
            size = trials[name].size
            result = {"trial": name, **as_result(contender.name, size, found, expected.get(size))}
            if "losses" in result:
                expected.setdefault(size, result["losses"])
            yield f"{contender.name}, {name}", result


def as_result(contender: str, size: GptSize, found: dict[str, Any], expected: list[float] | None) -> dict[str, Any]:
    """Returns what is kept of a run. Only ds_lgamp can fail the part: peers may run out of memory or time."""
    result = {key: value for key, value in found.items() if key in ("failure", NOT_RUN)}
    result |= {"contender": contender, "micro-batches": size.micro_batches}
    if "losses" in found:
        result |= {
            "tokens": size.tokens,
            "seconds": found["seconds"],
            "tokens per second": size.tokens / median(found["seconds"]),
            "peak bytes": found["peak"],
            "losses": found["losses"],
        }
        wrong = deviation(found["losses"], expected) if expected is not None else None
        if wrong:
            result["failure"] = wrong
    if not contender.startswith(OURS):
        return {"outcome" if key in ("failure", NOT_RUN) else key: value for key, value in result.items()}
    return result
