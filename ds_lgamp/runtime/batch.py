"""What belongs to one batch on a pipeline rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ds_lgamp.runtime.chunk import Buffers, Tensors
from ds_lgamp.runtime.saved_tensors import SavedTensors
from ds_lgamp.schedule.actions import Kind


class Graph(NamedTuple):
    """What a forward leaves for its backward."""

    beginning: Tensors
    """The chunk's input as leaves; with recomputation their data are what the chunk is computed from again, else they
    have none. Chunk 0: with recomputation, its input."""
    ends: Sequence[Any]
    """What :func:`end_graph` gives of the result; for the last chunk, the loss alone."""
    saved: SavedTensors | None
    """Those that are to be recomputed."""
    buffers: Buffers
    """Those that forwards move, as they were before."""


@dataclass
class Batch:
    """A batch while it runs.

    Args:
        micro_batches: how many it has.
        load: gives a micro-batch, (inputs of the first chunk, labels), by its number. The executor calls it once for
            each, on ranks that own an end of the model.
        training: whether backward passes follow.
        turns_at_once: whether the last chunk's backwards follow its forwards at once, so that recomputing it would
            save no memory.
    """

    micro_batches: int
    load: Callable[[int], tuple[Any, Any]]
    training: bool = True
    turns_at_once: bool = False
    graphs: dict[tuple[int, int], Graph] = field(default_factory=dict)
    """By chunk and micro-batch."""
    results: dict[tuple[Kind, int, int], Any] = field(default_factory=dict)
    """Of computes, until the next chunk or a send takes them: by kind, chunk and micro-batch."""
    labels: dict[int, Any] = field(default_factory=dict)
    """By micro-batch, on the rank of the last chunk."""
    losses: list[torch.Tensor] = field(default_factory=list)
    """By micro-batch, on the rank of the last chunk; in evaluation they may be the model's outputs."""
