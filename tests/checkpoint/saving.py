"""Tensors for the tests of saving. All elements hold the number of their save."""

from pathlib import Path

import torch
import torch.distributed as dist

from ds_lgamp.checkpoint.ranges import FlatShard
from ds_lgamp.checkpoint.values import encode
from ds_lgamp.checkpoint.whole import read_whole
from testing.checkpoints import example

SHAPE = (257, 129)
NAMES = ("parameters/0.weight", "optimizer/exp_avg/0.weight", "buffers/0/1.mean")


def numbered_tensors(number: int, shape: tuple[int, ...] = SHAPE) -> dict[str, FlatShard]:
    """Returns this rank's ranges, which end in the middle of rows. Every element is ``number``."""
    numel, ranks, rank = torch.Size(shape).numel(), dist.get_world_size(), dist.get_rank()
    start, end = numel * rank // ranks, numel * (rank + 1) // ranks
    return {name: FlatShard(shape, start, torch.full((end - start,), float(number))) for name in NAMES}


def numbered_state(number: int, shape: tuple[int, ...] = SHAPE) -> dict:
    parameters = {"0.weight": {"shape": list(shape), "group": 0}}
    return encode({**example().state, "parameters": parameters, "number": number})


def number_of(checkpoint: Path) -> int:
    """Returns the number of the save that wrote ``checkpoint``.

    Raises CheckpointError if it does not load, and AssertionError if it mixes several saves.
    """
    whole = read_whole(checkpoint)
    tensors = [whole.parameters["0.weight"], whole.moments["exp_avg"]["0.weight"], whole.buffers["1.mean"]]
    assert all(bool((tensor == whole.state["number"]).all()) for tensor in tensors)
    return whole.state["number"]
