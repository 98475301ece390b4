"""Turns a program into DeepSpeed's pipeline instructions."""

from collections.abc import Iterator

from deepspeed.runtime.pipe.schedule import PipeInstruction, PipeSchedule

from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.validate import validate


class ForwardChunk(PipeInstruction):
    """Computes a chunk's output for one micro-batch."""


class BackwardChunk(PipeInstruction):
    """Computes a chunk's gradients for one micro-batch."""


class SendChunkActivation(PipeInstruction):
    """Sends a chunk's output to the rank of the next chunk."""


class PostChunkActivation(PipeInstruction):
    """Posts the receive of a chunk's input. The forward that consumes the input waits for it."""


class SendChunkGradient(PipeInstruction):
    """Sends the gradient of a chunk's input to the rank of the previous chunk."""


class PostChunkGradient(PipeInstruction):
    """Posts the receive of the gradient of a chunk's output. The backward that consumes the gradient waits for it."""


class GatherChunk(PipeInstruction):
    """Launches the gather of a chunk's parameters."""


class ReleaseChunk(PipeInstruction):
    """Frees a chunk's gathered parameters."""


class ReduceChunk(PipeInstruction):
    """Launches the reduction of a chunk's gradients."""


class WaitGatheredChunk(PipeInstruction):
    """Waits for the gather of a chunk's parameters."""


class WaitReducedChunk(PipeInstruction):
    """Waits for the reduction of a chunk's gradients."""


class UpdateChunk(PipeInstruction):
    """Lets the optimizer update a chunk by itself."""


class LoadChunk(PipeInstruction):
    """Starts to load a chunk's weights from the host."""


class StoreChunk(PipeInstruction):
    """Starts to copy a chunk's gradients to the host."""


class WaitLoadedChunk(PipeInstruction):
    """Waits for the load of a chunk's weights."""


class WaitStoredChunk(PipeInstruction):
    """Waits until a chunk's gradients are on the host."""


class RefreshChunk(PipeInstruction):
    """Launches the gather, between nodes, of what the last step updated of a chunk."""


class CombineChunk(PipeInstruction):
    """Launches the sum, between nodes, of a chunk's gradients."""


class WaitRefreshedChunk(PipeInstruction):
    """Waits for the gather of a chunk between nodes."""


class WaitCombinedChunk(PipeInstruction):
    """Waits for the sum of a chunk's gradients between nodes."""


class StoreChunkInput(PipeInstruction):
    """Launches the copy of a chunk's input to the host."""


class LoadChunkInput(PipeInstruction):
    """Launches the copy of a chunk's input back to the device."""


class WaitStoredChunkInput(PipeInstruction):
    """Waits for the copy of a chunk's input to the host."""


class WaitLoadedChunkInput(PipeInstruction):
    """Waits for the copy of a chunk's input back to the device."""


class LayeredOptimizerStep(PipeInstruction):
    """Finishes gradients and steps the optimizer."""


INSTRUCTIONS: dict[Kind, type[PipeInstruction]] = {
    Kind.FORWARD: ForwardChunk,
    Kind.BACKWARD: BackwardChunk,
    Kind.SEND_FORWARD: SendChunkActivation,
    Kind.RECV_FORWARD: PostChunkActivation,
    Kind.SEND_BACKWARD: SendChunkGradient,
    Kind.RECV_BACKWARD: PostChunkGradient,
    Kind.GATHER: GatherChunk,
    Kind.RELEASE: ReleaseChunk,
    Kind.REDUCE: ReduceChunk,
    Kind.WAIT_GATHER: WaitGatheredChunk,
    Kind.WAIT_REDUCE: WaitReducedChunk,
    Kind.REFRESH: RefreshChunk,
    Kind.COMBINE: CombineChunk,
    Kind.WAIT_REFRESH: WaitRefreshedChunk,
    Kind.WAIT_COMBINE: WaitCombinedChunk,
    Kind.LOAD: LoadChunk,
    Kind.STORE: StoreChunk,
    Kind.WAIT_LOAD: WaitLoadedChunk,
    Kind.WAIT_STORE: WaitStoredChunk,
    Kind.STORE_INPUT: StoreChunkInput,
    Kind.LOAD_INPUT: LoadChunkInput,
    Kind.WAIT_STORE_INPUT: WaitStoredChunkInput,
    Kind.WAIT_LOAD_INPUT: WaitLoadedChunkInput,
    Kind.UPDATE: UpdateChunk,
    Kind.STEP: LayeredOptimizerStep,
}


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
        self._instructions = [INSTRUCTIONS[action.kind](action=action) for action in self.actions]

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields all instructions as one step, so that no barrier stands between them."""
        yield self._instructions

    def num_pipe_buffers(self) -> int:
        """Returns 0: the executor keeps its own buffers."""
        return 0
