"""The contenders: ways to train the model of ``benchmarks.model`` on several ranks."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from benchmarks.model import ModelSize
from benchmarks.record import Config


class Layout(NamedTuple):
    """The arrangement of ranks. Data-parallel ranks are neighbours. The model has one chunk per block."""

    pipeline_ranks: int
    data_ranks: int
    size: ModelSize

    @property
    def chunks_per_rank(self) -> int:
        return self.size.blocks // self.pipeline_ranks

    def config(self, micro_batches: int) -> Config:
        """The layout's part of a row's configuration."""
        return {
            "pipeline_ranks": self.pipeline_ranks,
            "data_ranks": self.data_ranks,
            "chunks_per_rank": self.chunks_per_rank,
            "micro_batches": micro_batches,
        }


class Training(Protocol):
    """A training on this rank."""

    def step(self, step: int, micro_batches: int) -> float | None:
        """Trains one batch. Returns its mean loss over all ranks' micro-batches; None if this rank does not know it."""

    def held(self) -> int:
        """Number of blocks whose full parameters this rank holds now."""


class Contender(NamedTuple):
    """A named training. ``build`` must be picklable."""

    name: str
    build: Callable[[Layout], Training]
    talks: bool = True
    """Whether the ranks train one model together, not one each."""
    rounds: bool = False
    """Whether what travels is rounded, so that losses differ from those of one process."""
