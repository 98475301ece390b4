"""What an executor works with: its place in the pipeline, where data lie, and the state of the batch that runs."""

import traceback
from abc import abstractmethod
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ds_lgamp.runtime.chunk import Moment, Tensors
from ds_lgamp.runtime.graph import StoredInputs
from ds_lgamp.runtime.meter import ChunkMeter
from ds_lgamp.runtime.recompute import SavedTensors
from ds_lgamp.runtime.split_backward import SecondParts
from ds_lgamp.schedule.actions import COMPUTE, STARTED, Action, Kind
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


class Begun(NamedTuple):
    """A forward that has its input."""

    action: Action
    trains: bool
    inputs: Any
    """What it computes on."""
    beginning: Tensors
    """As that of :class:`Graph`, as ``state`` and ``saved``."""
    state: Moment | None
    saved: SavedTensors | None
    meter: ChunkMeter | None
    """What measures it, if anything does."""


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


class ParameterHolder(Protocol):
    """Holds the parameters and gradients of the chunks: ZeroPartition, or a host's own data parallelism.

    Every holder gathers and reduces. Programs of hierarchical shards also refresh and combine, and programs of
    offloading also load and store: a holder that lacks these raises NotImplementedError, because a step without them
    would go on with stale weights or without gradients.
    """

    @abstractmethod
    def gather(self, chunk: int) -> None:
        """Launches the gather of a chunk's parameters."""

    @abstractmethod
    def wait_gather(self, chunk: int) -> None: ...

    @abstractmethod
    def release(self, chunk: int) -> None: ...

    @abstractmethod
    def begin_backward(self, chunk: int) -> None:
        """Prepares a chunk's gradients for a backward pass. The executor calls it before each one."""

    @abstractmethod
    def reduce(self, chunk: int) -> None:
        """Launches the reduction of a chunk's final gradients."""

    @abstractmethod
    def wait_reduce(self, chunk: int) -> None: ...

    def refresh(self, chunk: int) -> None:
        """Launches the gather, between nodes, of what the last step updated of a chunk."""
        raise _lacking(self, "hierarchical shards")

    def wait_refresh(self, chunk: int) -> None:
        raise _lacking(self, "hierarchical shards")

    def combine(self, chunk: int) -> None:
        """Launches the sum, between nodes, of a chunk's gradients."""
        raise _lacking(self, "hierarchical shards")

    def wait_combine(self, chunk: int) -> None:
        raise _lacking(self, "hierarchical shards")

    def load(self, chunk: int) -> None:
        """Starts to load a chunk's weights from the host."""
        raise _lacking(self, "offloading")

    def wait_load(self, chunk: int) -> None:
        raise _lacking(self, "offloading")

    def store(self, chunk: int) -> None:
        """Starts to copy a chunk's final gradients to the host."""
        raise _lacking(self, "offloading")

    def wait_store(self, chunk: int) -> None:
        raise _lacking(self, "offloading")


def _lacking(holder: ParameterHolder, what: str) -> NotImplementedError:
    return NotImplementedError(f"{type(holder).__name__} cannot run a program with {what}: it has no action for that")


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
    overlaps: bool = field(init=False)
    """Whether computes run beside each other's exchanges."""

    def __post_init__(self) -> None:
        self.recomputes = any(action.recomputed for action in self.program)
        self.overlaps = any(action.kind in STARTED for action in self.program)

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
