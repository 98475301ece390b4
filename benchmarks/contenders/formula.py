"""Provides the inputs of the formulas in ``ds_lgamp/cost`` for ds_lgamp on one rank."""

from collections.abc import Sequence

from benchmarks.contenders import Layout
from benchmarks.model import Block
from ds_lgamp.cost.units import UnitSize, aligned
from ds_lgamp.schedule.actions import Action
from ds_lgamp.schedule.orders import chunks_of
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_rank_program
from ds_lgamp.schedule.spec import ProgramSpec

LAYOUTS = ((1, 2), (2, 2))
"""Pipeline and data-parallel ranks of the communication and memory benchmarks."""


def program_of(
    layout: Layout,
    rank: int,
    micro_batches: int,
    zero_stage: int,
    resident_chunks: int,
    micro_batch_group: int | None = None,
    recomputes: bool = True,
) -> tuple[Sequence[Action], list[UnitSize]]:
    """Returns the program of a global rank and the units of its chunks. Without ``micro_batch_group``, all
    micro-batches form one group."""
    placement = place_chunks("modular", layout.size.blocks, layout.pipeline_ranks)
    group = micro_batch_group or micro_batches
    counts = micro_batches, group
    spec = ProgramSpec(placement, "layered", *counts, zero_stage, resident_chunks, recomputes=recomputes)
    pipeline_rank = rank // layout.data_ranks
    stored = sum(aligned(parameter.numel()) for parameter in Block(0, layout.size).parameters())
    units = [UnitSize(stored, stored, (chunk,)) for chunk in chunks_of(placement, pipeline_rank)]
    return build_rank_program(spec, pipeline_rank), units
