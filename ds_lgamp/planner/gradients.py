"""How much memory gradients take on a pipeline rank, while its backwards run and its reductions end."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ds_lgamp.planner.activations import Software
from ds_lgamp.planner.configuration import Configuration


class RankUnit(NamedTuple):
    """A unit of a pipeline rank, whose chunks are numbered on the rank."""

    first: int
    """Its first user among the chunks of the rank, and its last one."""
    last: int
    part: int
    """Elements of one part, and of all parts."""
    full: int
    copies: int


class Gradients:
    """The gradients of the ``units`` of a rank with so many ``chunks``."""

    def __init__(
        self, configuration: Configuration, software: Software, units: Sequence[RankUnit], chunks: int
    ) -> None:
        self.configuration, self.software, self.element = configuration, software, software.element
        self.units, self.chunks = units, chunks
        self.partitioned = configuration.zero_stage > 0 and configuration.data_ranks > 1

    @property
    def reduces_every_group(self) -> bool:
        """Whether gradients are reduced after each group of micro-batches, as stages 2 and 3 do."""
        return self.partitioned and self.configuration.zero_stage > 1 and self.configuration.schedule == "layered"

    @property
    def most_full(self) -> int:
        """How many full gradients a rank may hold before a backward awaits the reduction of one."""
        return min(self.configuration.resident_chunks, self.chunks)

    def held(self, chunk: int, earlier: int, final: bool, begun: bool = True) -> tuple[int, int]:
        """Returns the bytes of gradients, and those of their buffers.

        Args:
            chunk: whose backward runs; -1 if all are done.
            earlier: how often all chunks have run their backwards before, in groups or rounds of micro-batches.
            final: whether no other group or round follows.
            begun: whether the chunk has a full gradient. Otherwise it waits until one less is held.
        """
        element, reduces = self.element, final or self.reduces_every_group
        if not self.partitioned:
            return element.gradients * sum(unit.part for unit in self.units), 0
        # Gradients that are not reduced after every group begin to accumulate once, so that none waits for a reduction.
        accumulated = earlier > 0 and not self.reduces_every_group
        held = self.chunks + 1 if accumulated else self.most_full + (chunk < 0 or not begun)
        shards = buffers = 0
        for unit in self.units:
            # Reductions begin in the order of the backwards, from the last chunk to the first.
            behind = unit.first - chunk
            accumulating = (unit.last >= chunk or accumulated) and not (reduces and behind > 0)
            accumulating = accumulating and (begun or behind < 0 or unit.last > chunk)
            reducing = reduces and 0 < behind < held
            reducing_earlier = earlier > 0 and self.reduces_every_group and behind < (0 if begun else 1)
            reducing_earlier = reducing_earlier and 0 < behind + self.chunks < held
            if accumulating or reducing or reducing_earlier:
                buffers += element.gradients * unit.full
            if reducing or reducing_earlier:
                buffers += element.gradients * (unit.full if self.software.all_to_all else unit.part)
            if (reduces and behind >= held) or (self.reduces_every_group and earlier > reducing_earlier):
                shards += element.master * unit.part
        return shards, buffers

    def finishing(
        self, awaited: list[RankUnit], gradients: int, buffers: int, new: bool
    ) -> Iterator[tuple[int, int, int]]:
        """Yields the bytes of gradients, of their buffers, and of the result of a reduction as each one ends.

        Args:
            awaited: the units under reduction that are awaited.
            gradients, buffers: before.
            new: whether results become gradients. Otherwise they are added to gradients that exist.
        """
        element = self.element
        if not self.partitioned or (element.gradients == element.master and not self.software.all_to_all):
            return
        for unit in sorted(awaited, key=lambda unit: -unit.first):
            yield gradients, buffers, element.master * unit.part
            buffers -= element.gradients * (unit.full + (unit.full if self.software.all_to_all else unit.part))
            gradients += element.master * unit.part if new else 0
