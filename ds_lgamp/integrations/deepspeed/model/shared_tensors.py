"""Tensors that several share: ranks their first values, tensor-parallel ranks slices, layers memory or buffers."""

import sys
from collections.abc import Callable, Iterable
from itertools import chain, compress, islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.split.parts import full_shape
from ds_lgamp.integrations.split.state import buffers_of, version_of
from ds_lgamp.partition.agreement import Term, everyone, raise_everywhere, refuse_differing_terms
from ds_lgamp.partition.memory import bytes_of, without_repetition
from ds_lgamp.partition.quantised import as_stored, constants

_PIECE = 2**26
"""Bytes that a device takes at once of a tensor that lies on the host."""


@torch.no_grad()
def share_values(
    tensors: Iterable[Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
    narrower: Callable[[Tensor], dist.ProcessGroup | None] = lambda _: None,
) -> None:
    """Gives ``tensors`` the values that they have on the first rank of ``group``. Collective over the group, with
    tensors of the same shapes in the same order.

    DeepSpeed broadcasts the bytes of each tensor through a view, which needs contiguous ones with a dimension.

    Args:
        device: where the group's messages lie.
        narrower: returns the part of the group whose first rank's values a tensor gets; None if it is all.
    """
    if dist.get_world_size(group) == 1:
        return
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        # Layers without memory are built later, and parameters of other kinds refused.
        if tensor.numel() and not tensor.is_meta and not _is_refused(tensor):
            with torch.inference_mode(tensor.is_inference()):
                _share(tensor, narrower(tensor) or group, device)


def _is_refused(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and type(tensor.data) not in (Tensor, FakeTensor)


def _share(tensor: Tensor, group: dist.ProcessGroup, device: torch.device) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        values = [tensor]
        dist.broadcast_object_list(values, group=group, group_src=0)
        tensor.copy_(values[0])
        return
    stored = tensor.detach()[without_repetition(tensor)]
    whole = stored.contiguous()
    for piece in bytes_of(whole).split(_PIECE):
        travelling = piece.to(device)
        dist.broadcast(travelling, group=group, group_src=0)
        if travelling is not piece:
            piece.copy_(travelling)
    if whole is not stored:
        stored.copy_(whole)


def values_of(module: nn.Module) -> Iterable[Tensor]:
    """Returns the parameters and the buffers of ``module``, and the constants of its quantised weights."""
    return chain(module.parameters(), module.buffers(), (tensor for _, tensor in constants(module)))


def share_given_layers(module: PipelineModule) -> None:
    """Gives the layers that are modules already, which every rank has, the values of the first rank of the pipeline.
    Collective over the pipeline. The values of other layers are those of the ranks that build them."""
    given = chain.from_iterable(values_of(spec) for spec in module._layer_specs if isinstance(spec, nn.Module))
    tensors = list({id(tensor): tensor for tensor in given}.values())
    own = [(tensor.shape, tensor.dtype, tensor.is_meta) for tensor in tensors]
    ranks = everyone(own, module._grid.get_pipe_parallel_group())
    # A script may leave out the values of layers that are another rank's.
    if len(set(map(len, ranks))) == 1:
        alike = [len(set(described)) == 1 for described in zip(*ranks)]
        share_over_pipeline(compress(tensors, alike), module)


def share_over_pipeline(tensors: Iterable[Tensor], module: PipelineModule) -> None:
    """Gives ``tensors`` the values of the first rank of this rank's pipeline. Collective over the pipeline."""
    device = torch.device(get_accelerator().device_name(module.local_rank))
    share_values(tensors, module._grid.get_pipe_parallel_group(), device)


def check_tensors(model: nn.Module) -> None:
    """Raises ConfigError on all ranks if they have other parameters or buffers in ``model``, or if one shares memory
    with a parameter. Brings quantised weights into the form in which they are saved. Collective over all ranks."""
    fix = "build the same model on all ranks"
    complaint = None
    try:
        as_stored(model)
    except ValueError as error:
        complaint = str(error)
    raise_everywhere(complaint, ConfigError)
    found = chain(model.named_parameters(), model.named_buffers(), constants(model))
    named = [item for item in found if not is_lazy(item[1])]
    terms = {f"the tensor {name} of the model": Term(_described(tensor), fix) for name, tensor in named}
    refuse_differing_terms(terms, ConfigError)
    raise_everywhere(complaint_about_layouts(model.named_buffers()), ConfigError)
    raise_everywhere(complaint_about_memory(named), ConfigError)


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {[*full_shape(tensor)]}{' without values' if tensor.is_meta else ''}"


class Sharing(NamedTuple):
    """How the tensor-parallel ranks share a parameter."""

    sliced_dimension: int | None = None
    """Each tensor-parallel rank has a slice along this dimension; None if each has the whole parameter."""
    partial_gradient: bool = False
    """Whether each tensor-parallel rank computes only a part of the gradient."""


def tensor_group(module: PipelineModule) -> dist.ProcessGroup | None:
    """Returns the group of this rank's tensor-parallel ranks; None if this rank is the only one."""
    grid = module._grid
    return grid.get_slice_parallel_group() if grid.get_slice_parallel_world_size() > 1 else None


def complaint_about_tensor_ranks(module: PipelineModule) -> str | None:
    """The sentence that refuses layers of Megatron-core that are sliced over other ranks than the axis ``model`` of
    the topology has; None if they are the same. Data-parallel ranks would otherwise mix up their slices."""
    megatron = sys.modules.get("megatron.core.parallel_state")
    if megatron is None or not megatron.model_parallel_is_initialized():
        return None
    if not any(map(is_model_parallel_parameter, module.parameters())):
        return None
    of_layers = dist.get_process_group_ranks(megatron.get_tensor_model_parallel_group())
    of_topology = list(module._grid.slice_group)
    if of_layers == of_topology:
        return None
    return (
        f"Megatron-core slices layers over the ranks {of_layers}, but the axis model of the topology has "
        f"{of_topology}; give PipelineModule PipeModelDataParallelTopology with num_mp={len(of_layers)}, or "
        f"initialize_model_parallel the tensor-parallel size {len(of_topology)}"
    )


def sharing_of(name: str, parameter: Parameter) -> Sharing:
    """Returns the sharing of ``parameter`` from Megatron-core's attributes ``tensor_model_parallel``,
    ``partition_dim``, ``partition_stride`` and ``sequence_parallel``.

    Raises ConfigError unless a sliced parameter has equal slices along one dimension, in the order of the ranks.
    """
    if not is_model_parallel_parameter(parameter):
        return Sharing(partial_gradient=bool(getattr(parameter, "sequence_parallel", False)))
    dimension, stride = (getattr(parameter, f"partition_{key}", None) for key in ("dim", "stride"))
    if dimension not in range(parameter.dim()) or stride not in (None, 1):
        raise ConfigError(
            f"parameter {name} is tensor-parallel with partition_dim {dimension} and partition_stride {stride}; give "
            "it a partition_dim, along which the ranks have equal slices in their order, and stride 1"
        )
    return Sharing(dimension)


def complaint_about_layouts(buffers: Iterable[tuple[str, Tensor]]) -> str | None:
    """Returns the sentence that refuses a sparse buffer or another one of a layout of its own; None if there is
    none."""
    for name, buffer in buffers:
        if buffer.layout is not torch.strided:
            return (
                f"the buffer {name} has the layout {buffer.layout}, in which ranks cannot send it; keep it as an "
                "attribute that is no buffer, or make it dense by to_dense()"
            )
    return None


def complaint_about_memory(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Returns the sentence that refuses a parameter which shares memory with another one of the tensors, or a trained
    one whose elements share it; None if there is none. The tensors have the names that the sentence shall use.

    Parameters move to the memory of their unit, also frozen ones, whose values a script may change.
    """
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in named:
        if type(tensor.data) is Tensor and tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta:
            if isinstance(tensor, Parameter) and tensor.requires_grad and _repeats(tensor):
                return (
                    f"elements of the parameter {name} share memory, which no optimizer can update; make it from a "
                    "clone() of its values"
                )
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for members in by_storage.values():
        # A model that was read from a file may have all tensors in one storage.
        placed = sorted(((_range(tensor), name, tensor) for name, tensor in members), key=lambda each: each[0].start)
        for number, (own, name, tensor) in enumerate(placed):
            for other, second_name, second in islice(placed, number + 1, None):
                if other.start >= own.stop:
                    break
                is_parameter = isinstance(tensor, Parameter) or isinstance(second, Parameter)
                if tensor is not second and is_parameter and _overlap(tensor, second):
                    return (
                        f"{name} and {second_name} share memory, but are two tensors, of which one would not follow "
                        "changes of the other; make them one parameter, or clone() one"
                    )
    return None


def _strides(tensor: Tensor) -> tuple[int, ...]:
    # Megatron's forks give parameters an attribute of this name, which hides the method.
    return Tensor.stride(tensor)


def _repeats(tensor: Tensor) -> bool:
    """Whether two elements of ``tensor`` may have one place in memory. True also for some strides that nobody uses."""
    last = 0
    for stride, size in sorted((stride, size) for stride, size in zip(_strides(tensor), tensor.shape) if size > 1):
        if stride <= last:
            return True
        last += stride * (size - 1)
    return False


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one storage have bytes in common."""
    # Columns of one matrix lie between each other.
    return first.dtype != second.dtype or bool(torch.isin(_places(first), _places(second)).any())


def _range(tensor: Tensor) -> range:
    last = sum(stride * (size - 1) for stride, size in zip(_strides(tensor), tensor.shape))
    size, start = tensor.element_size(), tensor.storage_offset()
    return range(start * size, (start + last + 1) * size)


def _places(tensor: Tensor) -> Tensor:
    """Returns where the elements of ``tensor`` lie in its storage."""
    places = torch.tensor([tensor.storage_offset()])
    for stride, size in zip(_strides(tensor), tensor.shape):
        places = (places[:, None] + stride * torch.arange(size)).flatten()
    return places


class SharedBuffers:
    """Notices changes of buffers that several ``layers`` share, which this rank has built."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        users: dict[int, list[tuple[nn.Module, str]]] = {}
        # The first and the last layer may be one module.
        for layer in {id(layer): layer for layer in layers}.values():
            places = {id(tensor): (module, name) for _, module, name, tensor in buffers_of(layer.named_modules())}
            for tensor, place in places.items():
                users.setdefault(tensor, []).append(place)
        shared = (place for places in users.values() if len(places) > 1 for place in places)
        # A cast gives modules that share a tensor, and not themselves, one each.
        self._places = list({(id(module), name): (module, name) for module, name in shared}.values())
        self._before: list[tuple[Tensor | None, int]] = []

    def look(self) -> None:
        """Begins to notice changes."""
        self._before = [_state(module._buffers[name]) for module, name in self._places]

    def check(self) -> None:
        """Raises ConfigError if one has changed since the last look. A table may grow."""
        for (module, name), (own, version) in zip(self._places, self._before):
            now, changes = _state(module._buffers[name])
            if own is None or now is None or (now is not own and now.shape != own.shape):
                continue
            if now is not own or changes != version:
                raise ConfigError(
                    f"several layers share the buffer '{name}' of a {type(module).__name__}, and a forward changes it, "
                    "but every pipeline rank has a copy of its own; give each layer its own buffer"
                )


def _state(tensor: Tensor | None) -> tuple[Tensor | None, int]:
    """Returns a buffer, and how often it was changed in place, which those of torch.inference_mode do not count."""
    return tensor, 0 if tensor is None else version_of(tensor)
