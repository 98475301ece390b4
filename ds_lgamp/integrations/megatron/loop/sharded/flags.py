"""Megatron-LM's flags beside ZeRO stages 2 and 3."""

from argparse import Namespace
from typing import Any

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.megatron.loop.flags import option_of

IMPLIED = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
"""Flags that ask for what the program does anyway. They may be given or not."""

EXPERTS = "experts are in data-parallel groups of their own, which stages 2 and 3 have not; remove it"
_WHOLE = "it reads whole weights or gradients, which no rank has; remove it"
_BUFFERS = "it needs Megatron-core's buffers of gradients, which stages 2 and 3 have not; remove it"

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_experts": ((None,), EXPERTS),
    "num_distributed_optimizer_instances": ((1,), "all data-parallel ranks share a chunk's shards; remove it"),
    "gradient_accumulation_fusion": (
        (False,),
        "its kernel adds to Megatron-core's buffers; give --no-gradient-accumulation-fusion",
    ),
    "defer_embedding_wgrad_compute": (
        (False,),
        "the gradient would come after it was reduced; remove it",
    ),
    "ddp_reduce_scatter_with_fp32_accumulation": ((False,), _BUFFERS),
    "check_for_large_grads": ((False,), _BUFFERS),
    "overlap_param_gather_with_optimizer_step": ((False,), _BUFFERS),
    "init_model_with_meta_device": ((False,), "it has not been tried with stages 2 and 3; remove it"),
    "save_wgrads_interval": ((None,), _WHOLE),
    "check_weight_hash_across_dp_replicas_interval": ((None,), _WHOLE),
    "qk_clip": ((False,), _WHOLE),
    "skip_train": ((False,), "nothing is trained, so that nothing would be sharded; set stage 0"),
    "vision_pretraining": ((False,), _WHOLE),
    "perform_rl_step": ((False,), _WHOLE),
    "async_save": ((None, False), "weights are complete only until the save returns; remove it"),
    "ckpt_format": (("torch_dist",), "it has not been tried with stages 2 and 3; use torch_dist"),
    "dump_param_to_param_group_map": ((None,), "it is written for whole parameters, which no rank has; remove it"),
    "load_main_params_from_ckpt": ((False,), "weights are taken as they are in the model; remove it"),
    "non_persistent_ckpt_type": ((None, "global"), "it has not been tried with stages 2 and 3; remove it"),
}
"""Flags that are refused, each with the values at which it changes nothing, and the reason with the fix."""


def prepare_sharding(args: Namespace) -> None:
    """Takes back the flags that :data:`IMPLIED` names, before Megatron-LM validates the arguments."""
    for name in IMPLIED:
        setattr(args, name, False)


def refuse_beside_sharding(settings: Any, arguments: bool = False) -> None:
    """Raises ConfigError for a flag that stages 2 and 3 cannot honour.

    Args:
        settings: one of Megatron-core's configurations, or Megatron-LM's arguments, once it has filled in its defaults.
        arguments: whether ``settings`` are Megatron-LM's arguments.
    """
    for name in REFUSED:
        _refuse(settings, name, arguments)


def _refuse(settings: Any, name: str, arguments: bool) -> None:
    harmless, note = REFUSED[name]
    value = getattr(settings, name, harmless[0])
    if value not in harmless:
        shown = option_of(name) if arguments else name
        raise ConfigError(f"{shown} is {value!r} beside zero_optimization.stage 2 or 3: {note}")
