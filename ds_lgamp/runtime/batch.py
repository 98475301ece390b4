"""The state of one batch on a pipeline rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ds_lgamp.runtime.chunk import Tensors
from ds_lgamp.runtime.layer_state import Moment
from ds_lgamp.runtime.saved_tensors import SavedTensors
from ds_lgamp.schedule.actions import Action, Kind

LoadMicroBatch = Callable[[int], tuple[Any, Any]]
"""Returns a micro-batch by its number, as (inputs of the first chunk, labels)."""


class Graph(NamedTuple):
    """The state that a forward leaves for its backward."""

    beginning: Tensors
    """The chunk's input, as leaves of its graph. With recomputation, they hold the data from which the chunk is
    computed again; otherwise they hold no data. Chunk 0 keeps the input itself with recomputation, else nothing."""
    ends: Sequence[Any]
    """The return value of :func:`end_graph` for the result; for the last chunk, only the loss, or what
    :func:`end_outputs` returned."""
    saved: SavedTensors | None
    """Saved tensors that recomputation restores; None if the chunk is not recomputed."""
    state: Moment | None
    """The state of the chunk's modules before this forward; None if the chunk is not recomputed."""


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
        name: names a micro-batch in errors, where its number alone does not tell whose it is.
    """

    micro_batches: int
    load: LoadMicroBatch
    training: bool = True
    program: Sequence[Action] = ()
    first_trained: int = 0
    returns_outputs: bool = False
    name: Callable[[int], str] | None = None
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
    row: int = -1
    """The index of the last action that was executed when the script had its turn."""
