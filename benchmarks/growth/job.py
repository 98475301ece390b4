"""The four numbers of a job, which grow one at a time."""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.record import Config, Record

LETTERS = {"pipeline_ranks": "P", "data_ranks": "W", "chunks_per_rank": "N", "micro_batches": "M"}
"""Letters by field of a job."""


class Job(NamedTuple):
    """A layered step with modular placement, at ZeRO stage 3 with two resident chunks."""

    pipeline_ranks: int
    data_ranks: int
    chunks_per_rank: int
    micro_batches: int

    @property
    def text(self) -> str:
        return " ".join(f"{LETTERS[field]}{number}" for field, number in self._asdict().items())

    def config(self, axis: str) -> Config:
        """The job's configuration in a row along ``axis``, which is a letter."""
        return {"axis": axis, **self._asdict()}


class Axis(NamedTuple):
    """A field that takes the ascending ``values`` while the others stay as in ``base``. The base's own value is among
    them."""

    field: str
    base: Job
    values: Sequence[int]

    @property
    def jobs(self) -> list[Job]:
        return [self.base._replace(**{self.field: value}) for value in self.values]

    @property
    def name(self) -> str:
        return LETTERS[self.field]

    @property
    def grows_ranks(self) -> bool:
        return self.field in ("pipeline_ranks", "data_ranks")

    def aim(self, record: Record, text: str, found: Sequence[float], limit: float) -> None:
        """Enters a target: the last number in ``found`` must be at most ``limit`` times that of the base.

        ``found`` has one number for each of ``values``.
        """
        base = getattr(self.base, self.field)
        ratio = found[-1] / found[self.values.index(base)]
        record.aim(f"{text}, {self.name} = {self.values[-1]} / {self.name} = {base}", ratio, limit)
