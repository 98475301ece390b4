"""Builds a program from a compute order: the actions of every pipeline rank.

Around each compute, actions come in this order: RELEASE, GATHER, RECV (posted before use), WAIT_GATHER and
WAIT_REDUCE, the compute, its SEND, and REDUCE if the chunk's gradient is final. The program ends with the last
WAIT_REDUCEs, STEP, and the gathers that stages 1 and 2 do not defer. Where the optimizer updates chunks one by one,
UPDATE follows the end of a reduction or precedes a GATHER. :mod:`ds_lgamp.schedule.transfers` says where LOAD
comes, :mod:`ds_lgamp.schedule.updates` where STORE comes.
"""

from collections.abc import Callable, Iterable

from ds_lgamp.schedule.actions import COLLECTIVES, Action, Program, Segments, joined
from ds_lgamp.schedule.passes import (
    add_receives,
    add_reductions,
    add_residency,
    add_sends,
    add_step,
    add_waits,
    mark_recomputed,
)
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.transfers import add_loads, add_stored_inputs
from ds_lgamp.schedule.updates import add_final_updates, add_postponed_updates, add_stores

Pass = Callable[[ProgramSpec, int, Segments], Segments]
"""Adds actions to those of one pipeline rank."""
PASSES = (
    mark_recomputed,
    add_residency,
    add_postponed_updates,
    add_receives,
    add_sends,
    add_reductions,
    add_step,
    add_waits,
    add_final_updates,
    add_loads,
    add_stores,
    add_stored_inputs,
)
"""In the order they apply. All schedules share them."""
_TIMED_PASSES = tuple(add for add in PASSES if add not in (add_receives, add_sends))


def build_program(spec: ProgramSpec) -> Program:
    """Builds the programs of all pipeline ranks."""
    return [build_rank_program(spec, rank) for rank in range(spec.pipeline_ranks)]


def build_timed_program(spec: ProgramSpec) -> Program:
    """Builds the programs of all pipeline ranks without SEND and RECV, for the clock alone: ``simulate(...,
    sends_at_once=True)``.

    On the clock posts take no time, and each SEND directly follows its compute. So the times equal those of
    :func:`build_program`, with less work.
    """
    return [build_rank_program(spec, rank, _TIMED_PASSES) for rank in range(spec.pipeline_ranks)]


def build_rank_program(spec: ProgramSpec, rank: int, passes: Iterable[Pass] = PASSES) -> list[Action]:
    """Builds the program of one pipeline rank: applies every pass to its compute order."""
    segments = spec.segments(rank)
    for add in passes:
        segments = add(spec, rank, segments)
    return joined(segments)


def collectives_agree(replicas: Iterable[ProgramSpec]) -> bool:
    """Whether data-parallel ranks with these programs gather and reduce the same chunks in the same order. They have
    the same placement, but may have different numbers of micro-batches."""
    first, *others = set(replicas)
    return all(_collectives(other) == _collectives(first) for other in others)


def _collectives(spec: ProgramSpec) -> Program:
    """Returns the gathers and reductions of every pipeline rank. Waits do not change their order, but decide where the
    collectives between nodes stand."""
    passes: tuple[Pass, ...] = (add_residency, add_reductions)
    if spec.hierarchy is not None:
        passes += (add_step, add_waits)
    program = (build_rank_program(spec, rank, passes) for rank in range(spec.pipeline_ranks))
    return [[action for action in actions if action.kind in COLLECTIVES] for actions in program]
