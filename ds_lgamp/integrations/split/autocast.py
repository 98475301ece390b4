"""The torch.autocast that a model's own forward enters around its blocks."""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch


class Autocast(NamedTuple):
    """Whether autocast is on for a type of device, and to which dtype it casts."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def on(cls, device_type: str) -> "Autocast":
        """Returns what holds here."""
        return cls(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    def entered(self) -> AbstractContextManager[None]:
        """Returns a context in which it holds."""
        if self == self.on(self.device_type):
            return nullcontext()
        return torch.autocast(self.device_type, self.dtype, self.enabled)
