"""Random trainings, and what happens to them."""

import random
from collections.abc import Collection, Sequence
from typing import NamedTuple

from testing.chaos.faults import DOORS, FAULTS, HANG_TIMEOUT, STEPS


class Job(NamedTuple):
    """A training, and what happens to it."""

    door: str
    pipeline_ranks: int
    data_ranks: int
    zero_stage: int
    schedule: str
    micro_batches: int
    layers: int
    save_every: int
    """Steps."""
    asynchronous_save: bool
    fault: str
    rank: int
    """The rank that meets the fault."""
    step: int
    """When, at the earliest."""
    place: str
    delay: float
    """Seconds, for a fault at any moment."""
    again: Sequence[int] | None = None
    """Pipeline ranks, data-parallel ranks and ZeRO stage of the second start; None if they are the same."""
    steps: int = STEPS
    hang_timeout: float = HANG_TIMEOUT

    @property
    def ranks(self) -> int:
        return self.pipeline_ranks * self.data_ranks

    @property
    def other(self) -> int:
        """The rank at the other end of the link that goes dead: the next one of the same pipeline, or the next
        data-parallel rank where the pipeline has one rank."""
        apart = self.data_ranks if self.pipeline_ranks > 1 else 1
        return (self.rank + apart) % self.ranks

    @property
    def alike(self) -> tuple[str | int, ...]:
        """Jobs for which this is the same have the same losses. Models of transformers have dropout, so there the
        layout matters; in other jobs it must not."""
        model = (self.door, self.layers)
        layout = (self.pipeline_ranks, self.data_ranks, self.schedule, self.micro_batches)
        return (*model, *layout) if self.door == "transformers" else model

    @property
    def resumed(self) -> "Job":
        """The second start."""
        if self.again is None:
            return self
        pipeline_ranks, data_ranks, stage = self.again
        return self._replace(pipeline_ranks=pipeline_ranks, data_ranks=data_ranks, zero_stage=stage)

    @property
    def goes_on(self) -> bool:
        """Whether the job saves checkpoints from which it can go on."""
        return "save" in DOORS[self.door]


_RANKS = (1, 2), (2, 1), (2, 2), (1, 3)
"""Pipeline and data-parallel ranks."""


def random_job(draw: random.Random, without: Collection[str] = ()) -> Job:
    """Draws a job. It has none of the faults ``without``."""
    door = draw.choice([*DOORS, "pipeline"])
    met = {fault: _places(door, fault) for fault in FAULTS if fault not in without}
    fault = draw.choice([fault for fault, places in met.items() if places])
    pipeline_ranks, data_ranks = draw.choice(_RANKS)
    stages = (0, 2, 3) if door == "megatron" else (0, 1, 2, 3)
    again = *draw.choice([*_RANKS, (1, 1)]), draw.choice(stages)
    return Job(
        door=door,
        pipeline_ranks=pipeline_ranks,
        data_ranks=data_ranks,
        zero_stage=draw.choice(stages),
        schedule=draw.choice(["layered", "layered", "1f1b"]),
        micro_batches=draw.choice([1, 2, 4]),
        layers=draw.choice([2, 4] if door == "megatron" else [2, 4, 5]),
        save_every=draw.choice([1, 2]),
        asynchronous_save=draw.choice([True, False]),
        fault=fault,
        rank=draw.randrange(pipeline_ranks * data_ranks),
        step=draw.randrange(3, STEPS - 1),
        place=draw.choice(met[fault]),
        delay=round(draw.uniform(0, 0.5), 3),
        # Where dropout draws, another layout has other losses.
        again=again if door in ("pipeline", "plain") else None,
    )


def _places(door: str, fault: str) -> list[str]:
    """Returns where a job can meet a fault."""
    if fault == "corrupt checkpoint" and "save" not in DOORS[door]:
        return []
    return [place for place in FAULTS[fault].places if place in (*DOORS[door], "any moment")]
