"""The border between host and device: real tensors here, fake ones there, and what crosses it is seen."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ds_lgamp.integrations.hosts import replace_attribute
from testing.imagined_gpu.device import DEVICE, NAME


class Border(TorchDispatchMode):
    """Computes operations on the host. Of those on the device, follows types and shapes.

    Operations that need values of the device raise, except for reading a number outside a step, which is 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.between_hosts: list[str] = []
        """What hosts have sent to each other so far: each wait for it is one for another rank."""

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        namespace, name = function._schema.name.split("::")
        if not any(map(is_on_device, tree_leaves((args, kwargs)))):
            if namespace == "c10d":
                self.between_hosts.append(name)
            page_locked = kwargs.get("pin_memory")
            with unset_fake_temporarily():
                result = function(*args, **(kwargs | {"pin_memory": False} if page_locked else kwargs))
                return pinned(result) if page_locked else result
        if namespace == "c10d":
            return _imitated(function, args)
        if name == "_local_scalar_dense":
            DEVICE.host_waits("a number is read from the device")
            return 0
        if name == "_to_copy" and "device" in kwargs and is_on_device(kwargs["device"]) != is_on_device(args[0]):
            return _moved(*args, **kwargs)
        if name == "copy_" and is_on_device(args[0]) != is_on_device(args[1]):
            if is_on_device(args[0]) and args[1].dim() == 0:
                # A number of the host is an argument of the kernel.
                return args[0]
            in_background = (*args[2:], kwargs.get("non_blocking", False))[0]
            if not (in_background and hasattr(args[0], "is_page_locked")):
                _check_move(args[1], in_background)
            return args[0]
        return function(*args, **kwargs)


def is_on_device(value: Any) -> bool:
    """Whether ``value`` is a tensor on the device, or the device."""
    return isinstance(value, FakeTensor) or (isinstance(value, torch.device) and value.type == NAME)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy that counts as lying in page-locked memory."""
    copy = tensor.clone()
    copy.is_page_locked = True
    return copy


def _moved(
    source: torch.Tensor,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    **_: Any,
) -> torch.Tensor:
    _check_move(source, non_blocking)
    return torch.zeros(source.shape, dtype=dtype or source.dtype, device=device)


def _check_move(source: torch.Tensor, non_blocking: bool = False) -> None:
    if is_on_device(source):
        DEVICE.host_waits("a tensor is copied to the host")
    elif not non_blocking:
        DEVICE.host_waits("a tensor is copied to the device, and the host waits for it")
    elif not hasattr(source, "is_page_locked"):
        DEVICE.host_waits("a tensor is copied to the device from memory that is not page-locked")


def _imitated(collective: Any, args: tuple) -> Any:
    """Returns what a collective of the device returns: its outputs, which are its first argument, and a work that is
    done."""
    kinds = [str(result.type) for result in collective._schema.returns]
    results = [_distributed_c10d.FakeWork().boxed() if kind.endswith("Work") else args[0] for kind in kinds]
    return tuple(results) if len(results) > 1 else results[0]


@contextmanager
def imagine() -> Iterator[Border]:
    """Inside the block, torch can make tensors on the device."""
    with ExitStack() as stack:
        for name in ("all_gather_object", "broadcast_object_list"):
            for module in (dist, dist.distributed_c10d):
                replace_attribute(module, name, _between_hosts(getattr(module, name)), stack)
        replace_attribute(nn.Module, "_apply", _converted, stack)
        # Fake storages have no address, but an identity.
        replace_attribute(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata, stack)
        # Lets torch.tensor build on the host and copy. Otherwise it would copy to the device before the modes see it.
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(Border())


def _between_hosts(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """Lets hosts exchange objects as ever: this makes tensors of memory that the modes would take for fake."""

    @wraps(exchange)
    def exchanged(*arguments: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return exchange(*arguments, **options)

    return exchanged


def _converted(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Converts the tensors of a module in place, as torch does with real ones. Fake parameters torch would swap, which
    fails where anything refers to them."""
    for child in module.children():
        child._apply(function)
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            with torch.no_grad():
                converted = function(tensor)
            if not isinstance(tensor, nn.Parameter):
                tensors[name] = converted
            elif is_on_device(tensor) == is_on_device(converted):
                tensor.data = converted
            else:
                tensors[name] = nn.Parameter(converted, tensor.requires_grad)
    return module
