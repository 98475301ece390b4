"""Refuses what splits a model, or its data, beside a block: DTensors, transformers' DistributedConfig, and sizes of
Accelerate's ParallelismConfig that DeepSpeed does not heed."""

import sys
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ds_lgamp.config import BLOCK, ConfigError

_IN_PLACE = {
    "tp_size": f"every rank would train the whole model on the same data; remove it, and set {BLOCK}.pipeline_ranks",
    "cp_size": "ring attention needs FSDP2; remove it, and share sequences by sp_size with sp_backend 'deepspeed'",
}
"""By the size of a ParallelismConfig that is refused: why, and what to use."""


def refuse_other_parallelism(model: nn.Module) -> None:
    """Raises ConfigError if another library has split ``model``, or is asked to split it or its data."""
    if getattr(model, "_device_mesh", None) is not None:
        raise ConfigError(
            f"transformers has split the {type(model).__name__} by {_sizes(model)}, but a {BLOCK} block splits the "
            f"whole model; load it without distributed_config, tp_plan and tp_size, and set {BLOCK}.pipeline_ranks and "
            "the ZeRO stage"
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


def _sizes(model: Any) -> str:
    """Returns the sizes with which transformers has split ``model``."""
    config = model.config.distributed_config
    names = ("tp_size", "ep_size", "fsdp_size", "dp_replicate_size", "pp_size")
    sizes = {name: getattr(config, name, None) or 1 for name in names}
    return "DistributedConfig with " + ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def _of_accelerate() -> Any:
    """Returns Accelerate's ParallelismConfig; None if it has none."""
    accelerate = sys.modules.get("accelerate.state")
    return None if accelerate is None else accelerate.AcceleratorState._shared_state.get("parallelism_config")
