"""Counts the copies between host and device that a training asks for on the CPU, where both are main memory."""

import sys
from collections.abc import Iterable
from typing import Any

import torch

from ds_lgamp.runtime.measure import storage_of

_copy, _to = torch.Tensor.copy_, torch.Tensor.to


class TwoPools:
    """Inside the block, main memory is two pools. A copy from one to the other counts and makes a tensor of its own.

    On the CPU, ``tensor.to(device)`` returns the tensor itself. It is still a call of the training, and counts. The
    methods of tensors are replaced: a mode of torch would not see what hooks of the backward pass call.

    Args:
        host: tensors that lie in the host's pool. All others are on the device.
        stores_in: the function of a peer whose calls of ``to`` go to the host; in all others they go to the device.
    """

    def __init__(self, host: Iterable[torch.Tensor], stores_in: str | None = None) -> None:
        self.bytes_loaded = self.bytes_stored = 0
        self._stores_in = stores_in
        self._host = {storage._cdata: storage for storage in map(storage_of, host)}
        """Storages, kept so that no other takes the address of one."""

    def __enter__(self) -> "TwoPools":
        torch.Tensor.copy_ = lambda target, source, *args, **kwargs: self._copied(target, source, args, kwargs)
        torch.Tensor.to = lambda source, *args, **kwargs: self._moved(source, args, kwargs)
        return self

    def __exit__(self, *_: Any) -> None:
        torch.Tensor.copy_, torch.Tensor.to = _copy, _to

    def on_host(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor)._cdata in self._host

    def _copied(self, target: torch.Tensor, source: torch.Tensor, args: tuple, kwargs: dict) -> torch.Tensor:
        if self.on_host(target) and not self.on_host(source):
            self.bytes_stored += source.nbytes
        elif self.on_host(source) and not self.on_host(target):
            self.bytes_loaded += source.nbytes
        return _copy(target, source, *args, **kwargs)

    def _moved(self, source: torch.Tensor, args: tuple, kwargs: dict) -> torch.Tensor:
        stores = sys._getframe(2).f_code.co_name == self._stores_in
        if not _names_device(args, kwargs) or stores == self.on_host(source):
            return _to(source, *args, **kwargs)
        result = _to(source.detach().clone(), *args, **kwargs)
        if stores:
            self.bytes_stored += source.nbytes
            self._host[storage_of(result)._cdata] = storage_of(result)
        else:
            self.bytes_loaded += source.nbytes
        return result


def _names_device(args: tuple, kwargs: dict) -> bool:
    return "device" in kwargs or any(isinstance(each, str | torch.device) for each in args)
