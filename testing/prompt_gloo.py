"""Lets memory be asserted to the byte although gloo's threads hold tensors for a moment after a collective is done."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from ds_lgamp.optimizers import tensors as of_tensors
from ds_lgamp.runtime.measure import storage_of

DEADLINE = 60.0
"""Seconds. Takes microseconds on an idle machine; a thread must be scheduled once."""


@contextmanager
def prompt_exchanges() -> Iterator[None]:
    """Makes the collectives of optimizers return after gloo has let go of their tensors."""
    with (
        patch.object(of_tensors.dist, "all_to_all_single", _prompt(of_tensors.dist.all_to_all_single)),
        patch.object(of_tensors, "start_all_gather", _prompt(of_tensors.start_all_gather)),
    ):
        yield


def _prompt(collective: Callable[..., Any]) -> Callable[..., Any]:
    def finished(*args: Any, **kwargs: Any) -> Any:
        tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
        holders = list(map(_holders, tensors))
        work = collective(*args, **kwargs)
        if work is not None:
            work.wait()
            del work  # It holds the tensors, too.
        patience = time.monotonic() + DEADLINE
        while list(map(_holders, tensors)) != holders:
            assert time.monotonic() < patience, "gloo holds a tensor of a finished collective"
            time.sleep(0.0001)
        return _Done()

    return finished


class _Done:
    """A collective whose tensors nobody holds."""

    def wait(self) -> None: ...


def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns how many references the tensor has, and how many tensors its memory has."""
    return tensor._use_count(), torch._C._storage_Use_Count(storage_of(tensor)._cdata)
