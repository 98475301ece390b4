"""Every rank begins with the values of the first rank that has them, in parameters and in buffers of any layout."""

from collections.abc import Iterable
from itertools import chain, compress

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.model.shared_memory import complaint_about_memory
from ds_lgamp.partition.agreement import Term, everyone, raise_everywhere, refuse_differing_terms
from ds_lgamp.partition.memory import bytes_of, without_repetition

_PIECE = 2**26
"""Bytes that a device takes at once of a tensor that lies on the host."""


@torch.no_grad()
def share_values(tensors: Iterable[Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    """Gives ``tensors`` the values that they have on the first rank of ``group``. Collective over the group, with
    tensors of the same shapes in the same order.

    DeepSpeed broadcasts the bytes of each tensor through a view, which needs contiguous ones with a dimension.

    Args:
        device: where the group's messages lie.
    """
    if dist.get_world_size(group) == 1:
        return
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        # Layers without memory are built later, and parameters of other kinds refused.
        if tensor.numel() and not tensor.is_meta and not _is_refused(tensor):
            with torch.inference_mode(tensor.is_inference()):
                _share(tensor, group, device)


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
    """Returns the parameters and the buffers of ``module``."""
    return chain(module.parameters(), module.buffers())


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
    with a parameter. Collective over all ranks."""
    fix = "build the same model on all ranks"
    named = [item for item in chain(model.named_parameters(), model.named_buffers()) if not is_lazy(item[1])]
    terms = {f"the tensor {name} of the model": Term(_described(tensor), fix) for name, tensor in named}
    refuse_differing_terms(terms, ConfigError)
    raise_everywhere(complaint_about_memory(named), ConfigError)


def _described(tensor: Tensor) -> str:
    # That of zero.Init.
    shape = [*getattr(tensor, "ds_shape", tensor.shape)]
    return f"{tensor.dtype} of shape {shape}{' without values' if tensor.is_meta else ''}"
