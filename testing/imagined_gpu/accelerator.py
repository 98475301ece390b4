"""The imagined device as DeepSpeed knows it, and the preparation of ranks that have one."""

import os
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from torch._C._distributed_c10d import FakeProcessGroup

from testing.imagined_gpu.border import is_on_device, pinned
from testing.imagined_gpu.device import DEVICE, NAME, Event, register

BACKEND = f"cpu:gloo,{NAME}:nothing"
"""Hosts talk over gloo. Between devices nothing travels."""


class ImaginedAccelerator(CUDA_Accelerator):
    """CUDA's, except for what would ask a CUDA device."""

    Event = Stream = Event

    def __init__(self) -> None:
        super().__init__()
        self._name, self._communication_backend_name = NAME, "nothing"

    def device_name(self, device_index: int | None = None) -> str:
        return NAME if device_index is None else f"{NAME}:0"

    def current_device_name(self) -> str:
        return f"{NAME}:0"

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None:
        DEVICE.synchronize()

    def current_stream(self, device_index: int | None = None) -> Event:
        return Event()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return 0

    max_memory_allocated = memory_allocated

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor if hasattr(tensor, "is_page_locked") else pinned(tensor)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return is_on_device(tensor)


def prepare_rank(rank: int) -> None:
    """Gives this process the device, before its process group exists."""
    os.environ["LOCAL_RANK"] = "0"
    register()
    set_accelerator(ImaginedAccelerator())
    dist.Backend.register_backend("nothing", _nothing, extended_api=True, devices=[NAME])


def _nothing(group: Any, options: Any) -> Any:
    return FakeProcessGroup._create_internal(group.group_rank, group.group_size, FakeProcessGroup.Options())
