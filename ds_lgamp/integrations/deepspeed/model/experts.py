"""Experts of ``deepspeed.moe``, which data-parallel ranks divide among each other: their groups, and what does not know
them yet."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.utils import groups as stock_groups
from torch import Tensor, nn

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.deepspeed.model.module import built_layers, global_names, tensors_of


def has_experts(model: nn.Module) -> bool:
    """Whether ranks divide experts of ``model`` among each other."""
    return any(isinstance(module, MoE) and module.ep_size > 1 for module in model.modules())


def expert_group(tensor: Tensor) -> dist.ProcessGroup | None:
    """Returns the ranks that have copies of an expert's parameter; None if ``tensor`` is that of no divided expert."""
    name = getattr(tensor, "group_name", None)
    if getattr(tensor, "allreduce", True) or name in (None, _UNDIVIDED):
        return None
    return stock_groups._get_expert_data_parallel_group_dict().get(name)


def is_of_unknown_group(tensor: Tensor) -> bool:
    """Whether a parameter says that ranks differ in it, but not by a group of DeepSpeed's experts."""
    known = (_UNDIVIDED, *stock_groups._get_expert_data_parallel_group_dict())
    return not getattr(tensor, "allreduce", True) and getattr(tensor, "group_name", None) not in known


_UNDIVIDED = "ep_size_1"
"""What DeepSpeed calls the group of experts that every rank has."""


@contextmanager
def with_groups(model: nn.Module, pipeline_ranks: int, experts_last: bool) -> Iterator[None]:
    """Makes the groups of the experts of ``model``, which has them inside the block, as DeepSpeed's engine will give
    them to it. Collective over all ranks.

    Args:
        pipeline_ranks: the experts of a layer are on the data-parallel ranks of one of them.
        experts_last: whether ranks with copies of an expert are neighbours, as use_data_before_expert_parallelism says.

    Raises ConfigError if the data-parallel ranks cannot divide the experts.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    data_ranks = dist.get_world_size() // pipeline_ranks
    for layer in layers:
        if data_ranks % layer.ep_size:
            raise ConfigError(
                f"an MoE layer has ep_size {layer.ep_size}, which does not divide the {data_ranks} data-parallel ranks "
                f"of {dist.get_world_size()} ranks with {BLOCK}.pipeline_ranks {pipeline_ranks}; use a divisor of "
                f"{data_ranks}"
            )
    for size in sorted({layer.ep_size for layer in layers}):
        stock_groups._create_expert_and_data_parallel(
            size, pp_size=pipeline_ranks, use_data_before_expert_parallel_=experts_last
        )
    for layer in layers:
        layer.set_deepspeed_parallelism()
    try:
        yield
    finally:
        for layer in layers:
            # It refuses to be given twice.
            layer.deepspeed_moe.ep_group = layer.deepspeed_moe.gate.ep_group = None


def whole_names(module: PipelineModule) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers of the built layers as :func:`global_names` does, but experts by their number
    among all ranks'. Such a name is the same however ranks divide them."""
    layers = built_layers(module)
    numbers: dict[int, tuple[str, int]] = {}
    for prefix, layer in layers.items():
        for path, part in layer.named_modules(prefix=prefix):
            if isinstance(part, MOELayer) and part.ep_size > 1:
                first = dist.get_rank(part.ep_group) * part.num_local_experts
                for number, expert in enumerate(part.experts.deepspeed_experts):
                    own = f"{path}.experts.deepspeed_experts."
                    numbers |= {id(tensor): (own, first + number) for _, tensor in tensors_of(expert)}
    for name, tensor in global_names(module):
        if id(tensor) in numbers:
            own, number = numbers[id(tensor)]
            name = f"{own}{number}.{name.removeprefix(own).partition('.')[2]}"
        yield name, tensor
