"""Errors of saving and loading, raised on all ranks together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ds_lgamp.partition.agreement import everyone


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or loaded. The message names the cause and the fix."""


class DamageError(CheckpointError):
    """A file of a checkpoint is missing or damaged."""


def distrusted(path: Path, complaint: Any, what: str = "checkpoint") -> CheckpointError:
    """Returns the error for a file of a form that no release writes, whatever its checksum says."""
    return CheckpointError(f"{path} is not what ds_lgamp writes ({complaint}); do not trust this {what}")


def everywhere(action: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Returns the result of ``action`` if it succeeds on all ranks. Raises CheckpointError on all ranks otherwise, as
    a DamageError if the first rank that fails met one. Collective."""
    result, complaint = None, None
    try:
        result = action()
    # CheckpointException is no subclass of Exception in torch.
    except (Exception, CheckpointException) as error:
        cause, rank = _cause(error, dist.get_rank())
        complaint = isinstance(cause, DamageError), sentence_of(cause, rank)
    first = next(filter(None, everyone(complaint, group)), None)
    if first is not None:
        is_damage, sentence = first
        raise (DamageError if is_damage else CheckpointError)(sentence)
    return result


def on_first_rank(action: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Returns on all ranks the result of ``action``, which the first rank calls. Raises as :func:`everywhere` does.
    Collective."""
    return everyone(everywhere(action if dist.get_rank(group) == 0 else lambda: None, group), group)[0]


def _cause(error: BaseException, rank: int) -> tuple[BaseException, int]:
    """Returns the error on ``rank``, or that on the first rank that torch.distributed.checkpoint names, with its
    rank."""
    if isinstance(error, CheckpointException) and error.failures:
        first = min(error.failures)
        return _cause(error.failures[first][0], first)
    return error, rank


def sentence_of(error: BaseException, rank: int) -> str:
    """Describes the error on ``rank``, or on the first rank that torch.distributed.checkpoint names."""
    error, rank = _cause(error, rank)
    if isinstance(error, CheckpointError):
        return str(error)
    lines = str(error).splitlines()
    return f"rank {rank}: {type(error).__name__}: {lines[0] if lines else ''}"
