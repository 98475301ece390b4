"""``deepspeed.zero.Init`` around a PipelineModule: the module is built whole, as if the context were not there.

``zero.Init`` partitions every parameter at once, over all ranks unless it is given a group. No pipeline can train such
a module. Pipeline ranks build different layers and wait for each other. Code that counts the parameters of layers finds
none. DeepSpeed's own pipeline engine multiplies with the empty parameters.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero import partition_parameters
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.model.module import global_names
from ds_lgamp.partition.agreement import raise_everywhere

_MARKS = {*partition_parameters.Init._convert_to_deepspeed_param.__code__.co_names, "ds_numel_aligned"}
"""Names that include all attributes that zero.Init sets on a parameter."""


def whole_construction(construct: Callable[..., None]) -> Callable[..., None]:
    """Returns the constructor of PipelineModule with ``zero.Init`` suspended, as ``deepspeed.initialize`` suspends it.

    If ``zero.Init`` partitioned layers before the constructor received them, they get their values back.
    """

    @wraps(construct)
    def construct_whole(self: PipelineModule, layers: Iterable[Any], *arguments: Any, **options: Any) -> None:
        layers = list(layers)
        make_whole(_parameters_in(layers))
        context = partition_parameters.top_level_context
        if context is None or not context.patched:
            return construct(self, layers, *arguments, **options)
        constructor = PipelineModule.__init__
        partition_parameters.shutdown_init_context()
        try:
            construct(self, layers, *arguments, **options)
        finally:
            partition_parameters.restore_init_context()
            # The constructor may be that of ds_lgamp.deferred_init(), which zero.Init does not know.
            PipelineModule.__init__ = constructor

    return construct_whole


def gather_partitioned(module: PipelineModule) -> None:
    """Gathers the parameters of ``module`` that ``zero.Init(module=...)`` has partitioned. Collective.

    Raises ConfigError on all ranks if the ranks that share a parameter are not those that have its layer.
    """
    partitioned = {name: tensor for name, tensor in global_names(module) if _is_partitioned(tensor)}
    raise_everywhere(_complaint(module, partitioned), ConfigError)
    make_whole(partitioned.values())


def make_whole(parameters: Iterable[Any]) -> None:
    """Gathers those of ``parameters`` that are partitioned and removes every mark of zero.Init. Collective over the
    ranks that share them."""
    for parameter in parameters:
        if _is_partitioned(parameter):
            parameter.all_gather()
            parameter.data = parameter.data.clone()
            for name in _MARKS & vars(parameter).keys():
                delattr(parameter, name)


def _is_partitioned(tensor: torch.Tensor) -> bool:
    """Returns whether zero.Init partitioned ``tensor``. Parameters of this package's engine have other marks."""
    return hasattr(tensor, "ds_tensor")


def _parameters_in(layers: list[Any]) -> list[nn.Parameter]:
    """Returns the parameters of the modules among ``layers`` and among the arguments of LayerSpecs. The list is the
    same on every rank."""
    found: dict[int, nn.Parameter] = {}
    for layer in layers:
        given = tree_leaves((getattr(layer, "module_args", ()), getattr(layer, "module_kwargs", {})))
        for module in (layer, *given):
            if isinstance(module, nn.Module):
                found.update((id(parameter), parameter) for parameter in module.parameters())
    return list(found.values())


def _complaint(module: PipelineModule, partitioned: dict[str, Any]) -> str | None:
    if module.num_stages == 1:
        return None
    owners = dist.get_process_group_ranks(module._grid.get_data_parallel_group())
    for name, parameter in partitioned.items():
        ranks = dist.get_process_group_ranks(parameter.ds_process_group)
        if ranks != owners:
            return (
                f"deepspeed.zero.Init partitioned parameter {name} over ranks {ranks}, but its pipeline rank has only "
                f"{owners}; build the PipelineModule inside deepspeed.zero.Init or ds_lgamp.deferred_init()"
            )
    return None
