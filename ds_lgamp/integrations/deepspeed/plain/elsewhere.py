"""The parameters of layers that other pipeline ranks hold, which have no elements on this rank."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import nn

from ds_lgamp.partition.guard import Guards, NotGatheredError


def release(module: nn.Module, own: Collection[int]) -> None:
    """Frees the parameters of ``module`` that are not in ``own``, which holds ids."""
    for parameter in module.parameters():
        if id(parameter) not in own:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


class Elsewhere:
    """Guards released parameters: functions that need their values raise NotGatheredError.

    Args:
        model: has these parameters and others.
        own: the ids of the others.
    """

    def __init__(self, model: nn.Module, own: Collection[int]) -> None:
        released = [(name, each) for name, each in model.named_parameters() if id(each) not in own]
        self._names = {id(parameter): name for name, parameter in released}
        self._guards = Guards((parameter for _, parameter in released), self._refuse)
        self._guards.put()

    @contextmanager
    def unguarded(self) -> Iterator[None]:
        """Inside the block they are parameters without elements."""
        self._guards.lift()
        try:
            yield
        finally:
            self._guards.put()

    def _refuse(self, parameter: torch.Tensor | None) -> NoReturn:
        name = self._names.get(id(parameter), "of the model")
        raise NotGatheredError(
            f"parameter {name} belongs to a layer on another pipeline rank and has no elements on this rank; leave out "
            "parameters without ds_id, or call model.state_dict() on all ranks, which gives rank 0 all values"
        )
