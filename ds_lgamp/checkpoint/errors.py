"""What cannot be written or loaded, known to all ranks."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ds_lgamp.partition.agreement import raise_everywhere


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or loaded; the message names what and the fix."""


def everywhere(action: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """The result of ``action`` if it succeeds on all ranks; otherwise raises CheckpointError on all. Collective."""
    result, complaint = None, None
    try:
        result = action()
    # Not an Exception in torch: CheckpointException.
    except (Exception, CheckpointException) as error:
        complaint = sentence_of(error, dist.get_rank())
    raise_everywhere(complaint, CheckpointError, group)
    return result


def sentence_of(error: BaseException, rank: int) -> str:
    """What happened on ``rank``, or on the first rank that torch.distributed.checkpoint names."""
    if isinstance(error, CheckpointException) and error.failures:
        first = min(error.failures)
        return sentence_of(error.failures[first][0], first)
    if isinstance(error, CheckpointError):
        return str(error)
    lines = str(error).splitlines()
    return f"rank {rank}: {type(error).__name__}: {lines[0] if lines else ''}"
