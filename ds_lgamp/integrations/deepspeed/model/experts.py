"""Experts that data-parallel ranks divide among each other, of ``deepspeed.moe``, Megatron-core or DeepSpeed's AutoEP:
their groups, their names and places in checkpoints, and what does not know them yet."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeAlias, runtime_checkable

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import (
    AUTOEP_PARAM_EP_RANK,
    AUTOEP_PARAM_LOCAL_EXPERTS,
    AUTOEP_PARAM_LOGICAL_SHAPE,
    DS_AUTOEP_UC_META,
)
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.utils import groups as stock_groups
from torch import Tensor, nn

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.cost.traffic import ExpertLayer
from ds_lgamp.cost.units import Travel
from ds_lgamp.integrations.deepspeed.model.module import built_layers, global_names, parts_in, tensors_of
from ds_lgamp.partition.agreement import anyone, everyone, raise_everywhere
from ds_lgamp.schedule.spec import ProgramSpec


@runtime_checkable
class MegatronExperts(Protocol):
    """The experts that a rank has of a layer of Megatron-core."""

    local_experts: nn.ModuleList
    ep_size: int
    """Among how many ranks the experts of the layer are divided."""
    ep_group: dist.ProcessGroup
    """These ranks."""
    first_expert: int
    """The number of the first of ``local_experts`` among those of all ranks."""


DividedLayer: TypeAlias = MoE | AutoEPMoELayer | MegatronExperts
"""A layer with experts, which ranks divide among each other."""


def divided(model: nn.Module) -> list[DividedLayer]:
    """Returns the layers of ``model`` whose experts ranks divide among each other."""
    return [layer for layer in _with_experts(model) if layer.ep_size > 1]


def _with_experts(model: nn.Module) -> Iterator[DividedLayer]:
    # To ask every module whether it keeps a protocol takes longer than all else that looks for experts.
    return (each for each in model.modules() if hasattr(each, "ep_size") and isinstance(each, DividedLayer))


def exchange_of(layer: MoE | AutoEPMoELayer, element: int) -> ExpertLayer:
    """Returns what the all-to-alls of a layer with divided experts carry, if all experts get as many tokens.

    Args:
        element: bytes of an element of hidden states.
    """
    if isinstance(layer, AutoEPMoELayer):
        token = layer.top_k * layer.hidden_size * element
        return ExpertLayer(layer.ep_size, token, layer.num_experts * torch.int32.itemsize)
    gate = layer.deepspeed_moe.gate
    # An expert has room for so many tokens, and all of it travels.
    copies = gate.k * gate.capacity_factor if gate.drop_tokens else gate.k
    return ExpertLayer(layer.ep_size, copies * gate.wg.in_features * element)


def place_among_experts(tensor: Tensor) -> tuple[int, int]:
    """Returns which of how many equal slices of a parameter ``tensor`` is. AutoEP slices along the first dimension, by
    experts; the experts of ``deepspeed.moe`` are parameters each."""
    if (meta := getattr(tensor, DS_AUTOEP_UC_META, None)) is None:
        return 0, 1
    return meta[AUTOEP_PARAM_EP_RANK], meta[AUTOEP_PARAM_LOGICAL_SHAPE][0] // len(meta[AUTOEP_PARAM_LOCAL_EXPERTS])


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


def sizes_of(model: nn.Module) -> set[int]:
    """Returns among how many ranks each the layers of ``model`` divide their experts."""
    return {layer.ep_size for layer in _with_experts(model)}


def make_groups(own: set[int], data_ranks: Sequence[int], experts_last: bool) -> None:
    """Makes the groups of ranks that divide experts, where DeepSpeed's engine looks for them. Collective over all
    ranks, which may have different layers.

    Args:
        own: the sizes of the groups that layers of this rank need.
        data_ranks: the global ranks that have the same layers as this one, which divide the experts of these.
        experts_last: whether ranks with copies of an expert are neighbours, as use_data_before_expert_parallelism says.

    Raises ConfigError on all ranks if they cannot divide the experts.
    """
    if not anyone(bool(own)):
        return
    sizes, ranks = sorted(set().union(*everyone(own))), len(data_ranks)
    for size in sizes:
        if ranks % size:
            raise ConfigError(
                f"ep_size of an MoE layer, or expert_parallel.autoep_size, is {size}, which does not divide the "
                f"{ranks} data-parallel ranks that share a layer; use a divisor of {ranks}, or other "
                f"{BLOCK}.pipeline_ranks"
            )
        pipeline_ranks = dist.get_world_size() // ranks
        stock_groups._create_expert_and_data_parallel(
            size, pp_size=pipeline_ranks, use_data_before_expert_parallel_=experts_last
        )
    complaint = None
    for size in sizes:
        dividing = stock_groups._get_expert_parallel_group_ranks(f"ep_size_{size}")
        copies = stock_groups._get_expert_data_parallel_group_ranks(f"ep_size_{size}")
        if not set(data_ranks).issuperset([*dividing, *copies]) or len(copies) * size != ranks:
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


def with_all_experts(tensor: Tensor) -> Tensor:
    """Returns ``tensor`` with the experts of all ranks that divide it. These call it together."""
    slices = place_among_experts(tensor)[1]
    if slices == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(slices)]
    dist.all_gather(parts, tensor.detach().contiguous(), stock_groups._get_expert_parallel_group(f"ep_size_{slices}"))
    return torch.cat(parts)


def refuse_around_experts(
    model: nn.Module, settings: LgampConfig, spec: ProgramSpec, travel: Travel, whole: bool, deferred: bool
) -> None:
    """Raises ConfigError on all ranks for what does not know divided experts.

    Args:
        whole: whether the optimizer needs whole tensors, as LAMB and Muon do, or whole blocks of them.
        deferred: whether layers have no memory yet.
    """
    refused = {
        "it is built inside ds_lgamp.deferred_init(); build it outside": deferred,
        "the optimizer is LAMB, Muon or one with state of 8 bits; use Adam, SGD or another one that works element by "
        "element": whole,
        "zero_hpz_partition_size or mics_shard_size is given; remove it": spec.hierarchy is not None,
        "a key zero_quantized_... is true, with which nobody has tried it; remove it": any(travel),
        f"{BLOCK}.live_checkpoint is given; remove it": settings.live_checkpoint is not None,
        f"{BLOCK}.recompute is 'auto', with which ranks do not recompute alike; use 'full' or 'none'": (
            settings.recompute == "auto"
        ),
        f"{BLOCK}.data_rank_speeds is given, with which ranks have other numbers of micro-batches; remove it": (
            settings.data_rank_speeds is not None
        ),
    }
    reason = next((reason for reason, holds in refused.items() if holds), None)
    layers = divided(model)
    complaint = next(filter(None, map(_complaint_about_ranks, layers)), None)
    if reason is not None and layers:
        complaint = f"ranks divide the experts of a layer (ep_size {layers[0].ep_size}), but {reason}"
    raise_everywhere(complaint, ConfigError)
    if settings.overlap_exchanges:
        _refuse_overlap(layers)


def _refuse_overlap(layers: Sequence[DividedLayer]) -> None:
    """Raises ConfigError on all ranks if no rank has experts that others need, or a layer keeps for itself what it
    returns of a micro-batch."""
    kinds = set[str]().union(*everyone({type(layer).__name__ for layer in layers}))
    given = f"{BLOCK}.overlap_exchanges is True"
    if others := kinds - {AutoEPMoELayer.__name__}:
        raise ConfigError(
            f"{given}, but layers keep the loss that balances experts of one micro-batch at a time ({min(others)}); "
            "divide experts by expert_parallel with autoep_size, or remove overlap_exchanges"
        )
    if not kinds:
        raise ConfigError(
            f"{given}, but ranks divide no experts, so that no tokens travel; set autoep_size in expert_parallel to 2 "
            "or more, or remove overlap_exchanges"
        )


def _complaint_about_ranks(layer: DividedLayer) -> str | None:
    """The sentence that refuses experts of Megatron-core which other ranks divide than DeepSpeed's groups say."""
    if not isinstance(layer, MegatronExperts):
        return None
    own = dist.get_process_group_ranks(layer.ep_group)
    stock = stock_groups._get_expert_parallel_group_ranks(f"ep_size_{layer.ep_size}")
    if own == [*stock]:
        return None
    return (
        f"Megatron-core divides experts among the ranks {own}, but DeepSpeed among {[*stock]}; remove "
        "use_data_before_expert_parallelism, and let neighbours in the topology's axis data have neighbouring ranks"
    )


def whole_names(module: PipelineModule) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers of the built layers as :func:`global_names` does, but experts by their number
    among all ranks'. Such a name is the same however ranks divide them."""
    numbers: dict[int, tuple[str, int]] = {}
    for path, part in parts_in(built_layers(module)):
        for own, experts, first in _numbered(path, part):
            for number, expert in enumerate(experts, first):
                numbers |= {id(tensor): (own, number) for _, tensor in tensors_of(expert)}
    for name, tensor in global_names(module):
        if id(tensor) in numbers:
            own, number = numbers[id(tensor)]
            name = f"{own}{number}.{name.removeprefix(own).partition('.')[2]}"
        yield name, tensor


def _numbered(path: str, part: nn.Module) -> Iterator[tuple[str, Iterable[nn.Module], int]]:
    """Yields how names of the experts of ``part`` begin, the experts, and the number of the first of them among all
    ranks', if ranks divide them."""
    if isinstance(part, MOELayer) and part.ep_size > 1:
        first = dist.get_rank(part.ep_group) * part.num_local_experts
        yield f"{path}.experts.deepspeed_experts.", part.experts.deepspeed_experts, first
    elif isinstance(part, MegatronExperts) and part.ep_size > 1:
        yield f"{path}.local_experts.", part.local_experts, part.first_expert
