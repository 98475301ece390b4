"""Errors of saving and loading, raised on all ranks together."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ds_lgamp.partition.agreement import raise_everywhere


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or loaded. The message names the cause and the fix."""


def everywhere(action: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Returns the result of ``action`` if it succeeds on all ranks. Raises CheckpointError on all ranks otherwise.
    Collective."""
    result, complaint = None, None
    try:
        result = action()
    # CheckpointException is no subclass of Exception in torch.
    except (Exception, CheckpointException) as error:
        complaint = sentence_of(error, dist.get_rank())
    raise_everywhere(complaint, CheckpointError, group)
    return result


def sentence_of(error: BaseException, rank: int) -> str:
    """Describes the error on ``rank``, or on the first rank that torch.distributed.checkpoint names."""
    if isinstance(error, CheckpointException) and error.failures:
        first = min(error.failures)
        return sentence_of(error.failures[first][0], first)
    if isinstance(error, CheckpointError):
        return str(error)
    lines = str(error).splitlines()
    return f"rank {rank}: {type(error).__name__}: {lines[0] if lines else ''}"
