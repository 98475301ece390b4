"""The seams of stages 2 and 3: what they replace, call or override in Megatron-core and in Megatron-LM."""

from ds_lgamp.integrations.hosts import missing_names, missing_parameters
from ds_lgamp.integrations.megatron.loop.seams import refuse

_OPTIMIZER = "megatron.core.optimizer"
NAMES: dict[str, tuple[str, ...]] = {
    f"{_OPTIMIZER}.optimizer.Float16OptimizerWithFloat16Params": (
        "_collect_main_grad_data_for_unscaling",
        "_copy_main_params_to_model_params",
        "_copy_model_grads_to_main_grads",
        "_copy_model_params_to_main_params",
    ),
    f"{_OPTIMIZER}.optimizer.MixedPrecisionOptimizer": (
        "get_grad_norm",
        "prepare_grads",
        "step_with_ready_grads",
    ),
    f"{_OPTIMIZER}.optimizer": ("param_group_identifier_keys",),
    "megatron.core.distributed.DistributedDataParallel": (
        "broadcast_params",
        "disable_forward_pre_hook",
        "enable_forward_pre_hook",
        "finish_grad_sync",
        "scale_gradients",
        "zero_grad_buffer",
    ),
    "megatron.core.process_groups_config.ProcessGroupCollection": ("use_mpu_process_groups",),
    "megatron.core.rerun_state_machine": ("get_rerun_state_machine",),
}
"""The names that must exist in each module or class."""
PARAMETERS: dict[str, tuple[str, ...]] = {
    f"{_OPTIMIZER}._get_param_groups": ("model_chunks", "config", "config_overrides"),
    f"{_OPTIMIZER}.clip_grads.clip_grad_by_total_norm_fp32": (
        "parameters",
        "max_norm",
        "total_norm",
        "use_decoupled_grad",
    ),
    f"{_OPTIMIZER}.get_megatron_optimizer": (
        "config",
        "model_chunks",
        "config_overrides",
        "use_gloo_process_groups",
        "pg_collection",
        "dump_param_to_param_group_map",
    ),
}
"""The parameters of each function, in order."""
TRAINING_LOOKUPS = {
    "megatron.training.training.save_checkpoint_and_time": ("save_checkpoint",),
    "megatron.training.training.setup_model_and_optimizer": ("get_megatron_optimizer",),
    "megatron.training.training.train": ("calc_params_l2_norm",),
}
"""The names that each function of Megatron-LM must look up when it is called."""


def check_sharding_seams() -> None:
    """Raises ConfigError if Megatron-core lacks a seam."""
    refuse(missing_names(NAMES) + missing_parameters(PARAMETERS), "this megatron-core")
