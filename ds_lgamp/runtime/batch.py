"""What an executor works with: its place in the pipeline, where data lie, and the state of the batch that runs."""

import traceback
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_lgamp.runtime.chunk import ParameterHolder, Tensors
from ds_lgamp.runtime.graph import StoredInputs
from ds_lgamp.runtime.layer_state import Moment
from ds_lgamp.runtime.recompute import SavedTensors
from ds_lgamp.runtime.split_backward import SecondParts
from ds_lgamp.schedule.actions import COMPUTE, Action, Kind
from ds_lgamp.schedule.placement import Placement
from ds_lgamp.watch.this_rank import this_rank

LoadMicroBatch = Callable[[int], tuple[Any, Any]]
"""Returns a micro-batch by its number, as (inputs of the first chunk, labels)."""


ANEW = "of a graph that recomputation makes"
"""Stands for an edge of a graph that is yet to come."""


class Graph(NamedTuple):
    """The state that a forward leaves for its backward."""

    beginning: Tensors
    """The chunk's input, as leaves of its graph. With recomputation, they hold the data from which the chunk is
    computed again; otherwise they hold no data. Chunk 0 keeps the input itself with recomputation, else nothing."""
    ends: Sequence[Any]
    """The return value of :func:`end_graph` for the result; for the last chunk, only the loss, or what
    :func:`end_outputs` returned. If recomputation makes a graph of its own, :data:`ANEW` stands for each edge."""
    saved: SavedTensors | None
    """Saved tensors that recomputation restores; None if the chunk is not recomputed, or makes a graph of its own."""
    state: Moment | None
    """The state of the chunk's modules before this forward; None if the chunk is not recomputed."""


class ActionError(RuntimeError):
    """An action failed. The message names the rank and the action."""


def mean_loss(loss: torch.Tensor, micro_batches: int) -> torch.Tensor:
    """Returns the gradient of the mean loss of all micro-batches with respect to the loss of one."""
    return torch.ones_like(loss) * (1 / micro_batches)


class Position(NamedTuple):
    """Where a rank is."""

    placement: Placement
    """Pipeline rank of every chunk."""
    rank: int
    """This pipeline rank."""
    alike: tuple[int, ...] = ()
    """The global ranks with the same chunks, including this one."""


class Storage(NamedTuple):
    """What holds parameters and inputs."""

    partition: ParameterHolder
    owns: Callable[[int, torch.Tensor], bool] | None = None
    """Tells whether a tensor is a view of a chunk's parameters; None if parameters are never released."""
    inputs: StoredInputs | None = None
    """Moves inputs to the host and back; None if the programs leave them on the device."""


class Calls(NamedTuple):
    """What a program calls besides chunks."""

    loss_function: Callable[[Any, Any], torch.Tensor] | None
    """Returns the loss from (output of the last chunk, labels); None if the last chunk returns the loss."""
    step: Callable[[], None]
    """Finishes gradients and steps the optimizer, after the last reduction."""
    update: Callable[[int], None] | None = None
    """Updates a chunk by itself; None if the programs leave all updates to the step."""
    loss_gradient: Callable[[torch.Tensor, int], torch.Tensor] = mean_loss
    """Returns the gradient with respect to the loss of one micro-batch, from (that loss, number of micro-batches). The
    backward pass starts from it."""


@dataclass
class BatchState:
    """One batch while it runs.

    Args:
        micro_batches: by how many the loss is averaged: the number of micro-batches on a data-parallel rank, or the
            mean of these numbers if they differ.
        load: loads a micro-batch. The executor calls it once for each, on ranks that own an end of the model.
        training: whether backward passes follow.
        program: the actions of this rank, which say what it waits for where it stands still.
        first_trained: the first chunk with a backward.
        returns_outputs: whether the script computes the loss from outputs, and gives their gradients.
        name: names a micro-batch in errors, where its number alone does not say whose it is.
        split_chunks: chunks whose backwards have two parts.
    """

    micro_batches: int
    load: LoadMicroBatch
    training: bool = True
    program: Sequence[Action] = ()
    first_trained: int = 0
    returns_outputs: bool = False
    name: Callable[[int], str] | None = None
    split_chunks: Set[int] = frozenset()
    graphs: dict[tuple[int, int], Graph] = field(default_factory=dict)
    """Graphs whose backward is still to come, by chunk and micro-batch."""
    results: dict[tuple[Kind, int, int], Any] = field(default_factory=dict)
    """Results of computes until the next chunk or a send takes them, by kind, chunk and micro-batch."""
    labels: dict[int, Any] = field(default_factory=dict)
    """Labels by micro-batch, on the rank of the last chunk."""
    losses: list[torch.Tensor] = field(default_factory=list)
    """Losses by micro-batch, on the rank of the last chunk. In evaluation they may be the model's outputs. For the
    script, they are outputs without their graph, until somebody takes them."""
    output_gradients: dict[int, Sequence[torch.Tensor | None]] = field(default_factory=dict)
    """What the script gave for outputs, by micro-batch: one for every floating-point tensor, or None."""
    second_parts: SecondParts = field(default_factory=SecondParts)
    row: int = -1
    """The index of the last action that was executed when the script had its turn."""
    recomputes: bool = field(init=False)
    """Whether a backward computes its chunk again."""

    def __post_init__(self) -> None:
        self.recomputes = any(action.recomputed for action in self.program)

    def clear(self) -> None:
        """Drops all tensors of a batch that failed, except losses and labels."""
        for held in (self.graphs, self.results, self.output_gradients):
            held.clear()
        self.second_parts.clear()

    def failure(self, pipeline_rank: int, action: Action | None, error: Exception) -> ActionError:
        """Returns an error that says where the batch failed, and why.

        Args:
            action: the action that failed; None if all had run.
        """
        where = "the end of the batch" if action is None else str(action)
        if self.name is not None and action is not None and action.kind in COMPUTE:
            where += f" ({self.name(action.micro_batch)})"
        of_batch = this_rank.whereabouts.label
        label = f" of {of_batch}" if of_batch else ""
        frames = traceback.extract_tb(error.__traceback__)
        source = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        return ActionError(
            f"rank {dist.get_rank()} (pipeline rank {pipeline_rank}) failed at {where}{label}: "
            f"{type(error).__name__}: {error}{source}"
        )
