"""Turns a program into DeepSpeed's pipeline instructions."""

from collections.abc import Iterator

from deepspeed.runtime.pipe.schedule import PipeInstruction, PipeSchedule

from ds_lgamp.schedule.actions import Action
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.validate import validate


class RunAction(PipeInstruction):
    """Runs the ``action`` of a program. The executor knows all kinds of actions, so DeepSpeed need not tell them
    apart."""


class ProgramSchedule(PipeSchedule):
    """The program of one pipeline rank. It can run any number of times.

    Building it validates the programs of all ranks. Raises ProgramError if one is faulty or if they deadlock.

    Args:
        spec: describes the programs of all ranks.
        stage_id: the pipeline rank.
    """

    def __init__(self, spec: ProgramSpec, stage_id: int) -> None:
        super().__init__(spec.micro_batches, spec.pipeline_ranks, stage_id)
        program = build_program(spec)
        validate(spec, program)
        self.spec = spec
        self.actions: list[Action] = program[stage_id]
        self._instructions = [RunAction(action=action) for action in self.actions]

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields all instructions as one step, so that no barrier stands between them."""
        yield self._instructions

    def num_pipe_buffers(self) -> int:
        """Returns 0: the executor keeps its own buffers."""
        return 0
