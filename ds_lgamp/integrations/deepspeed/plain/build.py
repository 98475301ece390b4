"""Builds the engine of a plain script, unless another library has split the model or its data."""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.utils import groups as stock_groups
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.deepspeed.config.client_optimizer import as_groups
from ds_lgamp.integrations.deepspeed.model.auto_ep import autoep_sizes, replace_experts
from ds_lgamp.integrations.deepspeed.model.construction import make_whole
from ds_lgamp.integrations.deepspeed.model.experts import make_groups, sizes_of
from ds_lgamp.integrations.deepspeed.model.shared_tensors import check_tensors, share_over_pipeline
from ds_lgamp.integrations.deepspeed.plain.engine import ModelEngine
from ds_lgamp.integrations.deepspeed.plain.layers import Layers, in_pipelines, needed_to_split, release
from ds_lgamp.integrations.deepspeed.plain.loss_engine import LossEngine
from ds_lgamp.integrations.deepspeed.plain.outputs_engine import OutputsEngine
from ds_lgamp.integrations.deepspeed.plain.wrapper import Wrapper, WrapperEngine, split_of
from ds_lgamp.partition.quantised import constants
from ds_lgamp.watch.this_rank import this_rank


def build_engine(settings: LgampConfig, arguments: dict[str, Any]) -> ModelEngine:
    """Returns the engine for the arguments that ``deepspeed.initialize`` passes to DeepSpeedEngine. Collective over all
    ranks; raises ConfigError on all if the engine cannot train the model as asked."""
    model = arguments["model"]
    refuse_other_parallelism(model)
    if model in this_rank.models or _has_hooks_of_zero_3(model):
        raise ConfigError(
            f"the {type(model).__name__} has an engine already, which a {BLOCK} block cannot replace; save its weights "
            "and give a new model to deepspeed.initialize or the Trainer, without auto_find_batch_size"
        )
    split, settings = split_of(model, settings)
    needed = needed_to_split(split, settings)
    check_tensors(model)
    divide_experts(model, settings, arguments)
    # Only this looks for parameters, so that experts which were replaced are not among them.
    make_whole(needed)
    layers, module = in_pipelines(split, model, settings)
    share_over_pipeline(model.buffers(), module)
    _keep_own_values(layers, module)
    _keep_own_parameters(module, arguments)
    check_layout(arguments.get("mpu"), module.mpu(), settings)
    rest = {name: value for name, value in arguments.items() if name != "model"}
    with _groups_of(arguments.get("mpu")):
        engine = _engine_class(split, settings)(split, layers, settings, {"model": module, **rest})
    this_rank.models.add(model)
    return engine


def divide_experts(model: torch.nn.Module, settings: LgampConfig, arguments: dict[str, Any]) -> None:
    """Makes the groups of ranks that divide experts of ``model``, and replaces these where the configuration asks for
    it."""
    pipeline_ranks, config = settings.pipeline_ranks or 1, arguments["config_class"]
    size = max(dist.get_world_size() // pipeline_ranks, 1)
    first = dist.get_rank() // size * size
    sizes = sizes_of(model) | autoep_sizes(config)
    refuse_shared_experts(arguments.get("mpu"), sizes)
    make_groups(sizes, range(first, first + size), bool(config.use_data_before_expert_parallel_))
    if sizes and (parameters := arguments.get("model_parameters")) is not None:
        # DeepSpeed lets lists alone follow layers that are replaced, and beside experts it wants names of groups.
        groups, grouped = as_groups(parameters)
        named = [{"name": f"group {number}", **group} for number, group in enumerate(groups)]
        arguments["model_parameters"] = named if grouped else groups[0]["params"]
    replace_experts(model, arguments, pipeline_ranks)


def _engine_class(split: torch.nn.Module, settings: LgampConfig) -> Callable[..., ModelEngine]:
    if isinstance(split, Wrapper):
        return WrapperEngine
    return LossEngine if settings.outputs == "loss" else OutputsEngine


@contextmanager
def _groups_of(mpu: Any) -> Iterator[None]:
    """Lets DeepSpeed find the groups of ``mpu``. It gives the last engine's to all engines that come."""
    before, stock_groups.mpu = stock_groups.mpu, mpu
    try:
        yield
    finally:
        stock_groups.mpu = before if mpu is None else mpu


def _has_hooks_of_zero_3(model: torch.nn.Module) -> bool:
    """Whether an engine of stock DeepSpeed gathers the parameters of ``model``."""
    names = (getattr(hook, "__qualname__", "") for hook in model._forward_pre_hooks.values())
    return any(name.startswith("DeepSpeedZeRoOffload") and "_pre_forward_module" in name for name in names)


def only_evaluates(arguments: dict[str, Any]) -> bool:
    """Whether the engine of these ``arguments`` gets nothing to train with, such as that of a reference model."""
    given = arguments.get("optimizer"), arguments.get("model_parameters"), arguments["config_class"].optimizer_name
    return all(each is None for each in given)


def _keep_own_values(layers: Layers, module: PipelineModule) -> None:
    """Gives all parameters the values of the pipeline's first rank, and frees those of layers that are not this rank's
    part of ``module``. Gathers those that zero.Init has partitioned, layer by layer, so that no rank ever holds the
    whole model."""
    kept, shared = {id(parameter) for parameter in module.parameters()}, set[int]()
    for layer in layers.modules:
        make_whole(layer.parameters())
        # Layers may share parameters, which are free by now on ranks that keep none of these layers.
        new = [parameter for parameter in layer.parameters() if id(parameter) not in shared]
        shared.update(map(id, new))
        share_over_pipeline([*new, *(tensor for _, tensor in constants(layer))], module)
        release(layer, kept)


def _keep_own_parameters(module: PipelineModule, arguments: dict[str, Any]) -> None:
    """Drops parameters that this rank has not built from the optimizer's groups."""
    own = {id(parameter) for parameter in module.parameters()}
    client, parameters = arguments.get("optimizer"), arguments.get("model_parameters")
    if isinstance(client, torch.optim.Optimizer):
        groups = client.param_groups
    elif parameters is not None:
        groups, grouped = as_groups(parameters)
        arguments["model_parameters"] = groups if grouped else groups[0]["params"]
    else:
        return
    for group in groups:
        group["params"][:] = [parameter for parameter in group["params"] if id(parameter) in own]


SEQUENCE_KEY = "sequence_parallel_size"


def sequence_ranks(mpu: Any) -> int:
    """Returns how many ranks share a sequence by DeepSpeed's Ulysses (arXiv 2506.13996): 1 if ``mpu`` is that of a
    pipeline, or None.

    Every rank of such a group gets a part of each sequence, and attention exchanges parts for heads. The script passes
    an ``mpu`` that knows these groups, which ``UlyssesSPAttentionHF.register_with_transformers`` returns.
    """
    # As DeepSpeed's configuration, which takes an mpu without data-parallel ranks for one of Ulysses.
    if mpu is None or hasattr(mpu, "get_data_parallel_world_size"):
        return 1
    return int(mpu.get_sequence_parallel_world_size())


def feeding_ranks(mpu: Any) -> int:
    """Returns how many ranks feed sequences of their own, as DeepSpeed's batch sizes count them."""
    if hasattr(mpu, "get_data_parallel_world_size"):
        return int(mpu.get_data_parallel_world_size())
    return dist.get_world_size() // sequence_ranks(mpu)


def check_sequence_key(config: dict[str, Any], mpu: Any) -> None:
    """Raises ConfigError if the configuration and the ``mpu`` differ in how many ranks share a sequence."""
    size = config.get(SEQUENCE_KEY)
    if size not in (None, sequence_ranks(mpu)):
        raise ConfigError(
            f"{SEQUENCE_KEY} is {size}, but deepspeed.initialize got no mpu by which {size} ranks share a sequence; "
            "pass that of UlyssesSPAttentionHF.register_with_transformers, or remove the key, which is not for a "
            "PipelineModule"
        )


def refuse_shared_experts(mpu: Any, sizes: Collection[int]) -> None:
    """Raises ConfigError if ranks share a sequence, and divide experts among each other in groups of these sizes."""
    if (ranks := sequence_ranks(mpu)) > 1 and max(sizes, default=1) > 1:
        raise ConfigError(
            f"{ranks} ranks share a sequence and {max(sizes)} divide the experts of a layer, which nobody has "
            "tried together; let every rank have all experts (ep_size or autoep_size 1), or whole sequences"
        )


def check_layout(mpu: Any, of_pipelines: Any, settings: LgampConfig) -> None:
    """Raises ConfigError if the script does not get what it needs for the loss of a sequence, or if ranks share a
    sequence that hold different layers.

    Args:
        mpu: what the script has passed.
        of_pipelines: the mpu of the pipelines that train the model.
    """
    ranks = sequence_ranks(mpu)
    if ranks == 1:
        return
    if settings.outputs != "all":
        raise ConfigError(
            f"{ranks} ranks share a sequence, whose loss only the script can compute; set {BLOCK}.outputs to 'all'"
        )
    if settings.recompute == "auto":
        raise ConfigError(
            f"{ranks} ranks share a sequence, and must recompute alike, but with {BLOCK}.recompute 'auto' each decides "
            "alone; use 'full' or 'none'"
        )
    sharing, data_ranks = (
        set(dist.get_process_group_ranks(group))
        for group in (mpu.get_sequence_parallel_group(), of_pipelines.get_data_parallel_group())
    )
    if not sharing <= data_ranks:
        raise ConfigError(
            f"{ranks} ranks share a sequence, but are not among the {len(data_ranks)} data-parallel ranks that hold "
            f"the same layers; use a {SEQUENCE_KEY} that divides {len(data_ranks)}, or fewer {BLOCK}.pipeline_ranks"
        )


_IN_PLACE = {
    "tp_size": f"every rank would train the whole model on the same data; remove it, and set {BLOCK}.pipeline_ranks",
    "cp_size": "ring attention needs FSDP2; remove it, and share sequences by sp_size with sp_backend 'deepspeed'",
}
"""By the size of a ParallelismConfig that is refused: why, and what to use."""


def refuse_other_parallelism(model: torch.nn.Module) -> None:
    """Raises ConfigError if another library has split ``model``, or is asked to split it or its data."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise ConfigError(
                f"the {type(module.module).__name__} is inside DistributedDataParallel, but a {BLOCK} block reduces "
                "gradients itself; pass the model without it to deepspeed.initialize"
            )
        if getattr(module, "_device_mesh", None) is not None and _distributed(module) is not None:
            raise ConfigError(
                f"transformers has split the {type(module).__name__} by {_sizes(module)}, but a {BLOCK} block splits "
                f"the whole model; load it without distributed_config, tp_plan, tp_size and ep_size, and set "
                f"{BLOCK}.pipeline_ranks and the ZeRO stage"
            )
    split = next((name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)), None)
    if split is not None:
        raise ConfigError(
            f"parameter {split} of the {type(model).__name__} is a DTensor, but a {BLOCK} block splits plain tensors; "
            "leave out what split the model, such as fully_shard or parallelize_module, and set "
            f"{BLOCK}.pipeline_ranks and the ZeRO stage"
        )
    for size, reason in _IN_PLACE.items():
        if (ranks := getattr(_of_accelerate(), size, 1)) > 1:
            raise ConfigError(f"ParallelismConfig has {size} {ranks}, but beside a {BLOCK} block {reason}")


def _distributed(model: Any) -> Any:
    """Returns transformers' DistributedConfig of ``model``; None if it has none."""
    return getattr(getattr(model, "config", None), "distributed_config", None)


def _sizes(model: Any) -> str:
    """Returns the sizes with which transformers has split ``model``."""
    config = _distributed(model)
    names = ("tp_size", "ep_size", "fsdp_size", "dp_replicate_size", "pp_size")
    sizes = {name: getattr(config, name, None) or 1 for name in names}
    return "DistributedConfig with " + ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def _of_accelerate() -> Any:
    """Returns Accelerate's ParallelismConfig; None if it has none."""
    accelerate = sys.modules.get("accelerate.state")
    return None if accelerate is None else accelerate.AcceleratorState._shared_state.get("parallelism_config")
