"""Experts of ``deepspeed.moe``, which data-parallel ranks divide among each other: their groups, their names in
checkpoints, and what does not know them yet."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.utils import groups as stock_groups
from torch import Tensor, nn

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.deepspeed.model.module import built_layers, global_names, tensors_of
from ds_lgamp.optimizers.lamb import Lamb
from ds_lgamp.optimizers.muon import Muon
from ds_lgamp.partition.agreement import everyone, raise_everywhere
from ds_lgamp.schedule.spec import ProgramSpec


def divided(model: nn.Module) -> list[MoE]:
    """Returns the layers of ``model`` whose experts ranks divide among each other."""
    return [module for module in model.modules() if isinstance(module, MoE) and module.ep_size > 1]


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


def make_groups(model: nn.Module, data_ranks: Sequence[int], experts_last: bool) -> None:
    """Makes the groups of the experts of ``model``, where DeepSpeed's engine looks for them. Collective over all ranks,
    which may have different layers.

    Args:
        data_ranks: the global ranks that have the same layers as this one, which divide the experts of these.
        experts_last: whether ranks with copies of an expert are neighbours, as use_data_before_expert_parallelism says.

    Raises ConfigError on all ranks if they cannot divide the experts.
    """
    own = {module.ep_size for module in model.modules() if isinstance(module, MoE)}
    sizes, ranks = sorted(set().union(*everyone(own))), len(data_ranks)
    for size in sizes:
        if ranks % size:
            raise ConfigError(
                f"an MoE layer has ep_size {size}, which does not divide the {ranks} data-parallel ranks that share a "
                f"layer; use a divisor of {ranks}, or other {BLOCK}.pipeline_ranks"
            )
        pipeline_ranks = dist.get_world_size() // ranks
        stock_groups._create_expert_and_data_parallel(
            size, pp_size=pipeline_ranks, use_data_before_expert_parallel_=experts_last
        )
    complaint = None
    for size in sizes:
        if not set(data_ranks).issuperset(stock_groups._get_expert_parallel_group_ranks(f"ep_size_{size}")):
            complaint = (
                f"experts are divided among ranks that have other layers than data-parallel ranks {[*data_ranks]}, as "
                "an earlier engine did with other pipeline_ranks, or as a topology does whose stages are not "
                "neighbours; make one engine per job, with the axes 'pipe' and 'data' in this order"
            )
    raise_everywhere(complaint, ConfigError)


@contextmanager
def with_groups(model: nn.Module) -> Iterator[None]:
    """Gives the experts of ``model`` their groups inside the block, as DeepSpeed's engine will do."""
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    for layer in layers:
        if any(hasattr(parameter, "ds_tensor") for parameter in layer.parameters()) and layer.ep_size > 1:
            raise ConfigError(
                f"zero.Init has spread experts of an MoE layer with ep_size {layer.ep_size} over all ranks, each of "
                "which has others; build the model outside of it, or let every rank have all experts (ep_size 1)"
            )
        layer.set_deepspeed_parallelism()
    try:
        yield
    finally:
        for layer in layers:
            # It refuses to be given one twice.
            layer.deepspeed_moe.ep_group = layer.deepspeed_moe.gate.ep_group = None


def refuse_around_experts(
    module: PipelineModule, settings: LgampConfig, spec: ProgramSpec, optimizer: Any, deferred: bool
) -> None:
    """Raises ConfigError on all ranks for what does not know divided experts.

    Args:
        module: its layers are placed.
        spec: the program of a step.
        optimizer: the optimizer.
        deferred: whether layers have no memory yet.
    """
    refused = {
        "it is built inside ds_lgamp.deferred_init(); build it outside": deferred,
        "the optimizer is LAMB or Muon; use Adam, SGD or another one that works element by element": isinstance(
            optimizer, Lamb | Muon
        ),
        "zero_hpz_partition_size or mics_shard_size is given; remove it": spec.hierarchy is not None,
        f"{BLOCK}.live_checkpoint is given; remove it": settings.live_checkpoint is not None,
        f"{BLOCK}.data_rank_speeds is given, with which ranks have other numbers of micro-batches; remove it": (
            settings.data_rank_speeds is not None
        ),
    }
    reason = next((reason for reason, holds in refused.items() if holds), None)
    complaint = None
    if reason is not None and (layers := divided(module)):
        complaint = f"ranks divide the experts of a layer (ep_size {layers[0].ep_size}), but {reason}"
    raise_everywhere(complaint, ConfigError)


def whole_names(module: PipelineModule) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers of the built layers as :func:`global_names` does, but experts by their number
    among all ranks'. Such a name is the same however ranks divide them."""
    numbers: dict[int, tuple[str, int]] = {}
    for prefix, layer in built_layers(module).items():
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
