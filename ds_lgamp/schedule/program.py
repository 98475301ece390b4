"""Builds a program from a compute order: the actions of every pipeline rank.

Around each compute, actions stand in this order: RELEASE, GATHER, RECV (posted ahead of use), WAIT_GATHER and
WAIT_REDUCE, the compute, its SEND, and REDUCE if the chunk's gradient is final. The program ends with the last
WAIT_REDUCEs, STEP, and the gathers that stages 1 and 2 do not defer.
"""

from ds_lgamp.schedule.actions import Action, Program
from ds_lgamp.schedule.passes import add_receives, add_reductions, add_residency, add_sends, add_step, add_waits
from ds_lgamp.schedule.spec import ProgramSpec

PASSES = (add_residency, add_receives, add_sends, add_reductions, add_step, add_waits)
"""In the order they apply. All schedules share them."""


def build_program(spec: ProgramSpec) -> Program:
    """Builds the programs of all pipeline ranks."""
    return [build_rank_program(spec, rank) for rank in range(spec.pipeline_ranks)]


def build_rank_program(spec: ProgramSpec, rank: int) -> list[Action]:
    """Builds the program of one pipeline rank: applies every pass to its compute order."""
    actions = list(spec.computes(rank))
    for add in PASSES:
        actions = add(spec, rank, actions)
    return actions
