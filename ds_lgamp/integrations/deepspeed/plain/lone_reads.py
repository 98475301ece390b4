"""Reads of a model's state by rank 0 alone, of layers that other ranks hold.

Scripts of stock DeepSpeed may ask for names again after all ranks have read values, on the rank that writes them. The
other ranks do not come then: they wait in a barrier of the script. So before ranks read again what they have read since
the last step, rank 0 calls the roll in the store of the job. Without the others it answers with names, shapes and
types, which never change. Values could have changed, and refuse to be read.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from ds_lgamp.partition.guard import absent
from ds_lgamp.watch.launcher import attempt

PATIENCE = 10.0
"""Seconds that rank 0 waits for the others."""
_PAUSE = 0.02
"""Seconds between two looks into the store."""


def others_read(number: int) -> bool:
    """Whether all ranks come to the same read as this one. Ranks other than 0 only say that they are there.

    Args:
        number: tells this read from others; all ranks give the same.
    """
    store, rank = _get_default_store(), dist.get_rank()
    key = f"ds_lgamp/reads/{attempt()}/{number}"
    if rank != 0:
        store.set(f"{key}/{rank}", "")
        return True
    others = [f"{key}/{other}" for other in range(1, dist.get_world_size())]
    end = time.monotonic() + PATIENCE
    while others and not store.check(others):
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE)
    return True


def without_values(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``state`` with tensors that only have shape and type. Names that share a tensor do so there, too."""
    tensors: dict[int, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and id(value) not in tensors:
            like = torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)
            tensors[id(value)] = absent(
                like,
                f"the value of {name} is read, but a state_dict that rank 0 alone calls has only names, shapes and "
                "types; keep the state that all ranks have read, or call state_dict on all ranks",
            )
    return {name: tensors.get(id(value), value) for name, value in state.items()}
