"""The seams: the places in DeepSpeed that the integration overrides, calls or reads.

:func:`check_seams` looks for ``NAMES`` before anything is installed. tests/integrations/test_seams.py looks for
``LOOKUPS``, and for attributes, inside DeepSpeed's functions.
"""

import importlib

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.hosts import missing_names, seam_label

TESTED_VERSION = "0.19.8"
LOOKUPS = ("DeepSpeedConfig", "PipelineEngine", "DeepSpeedEngine", "DeepSpeedHybridEngine", "DualPipeVEngine")
"""Global names that ``deepspeed.initialize`` must look up when it is called: ``install`` replaces them."""
NAMES: dict[str, tuple[str, ...]] = {
    "deepspeed": ("initialize", *LOOKUPS),
    "deepspeed.accelerator": ("get_accelerator",),
    "deepspeed.runtime.config": ("DeepSpeedConfig", "DtypeEnum"),
    "deepspeed.ops": ("__compatible_ops__",),
    "deepspeed.ops.adagrad": ("DeepSpeedCPUAdagrad",),
    "deepspeed.ops.adam": ("DeepSpeedCPUAdam", "FusedAdam"),
    "deepspeed.ops.lion": ("DeepSpeedCPULion", "FusedLion"),
    "deepspeed.runtime.base_optimizer": ("DeepSpeedOptimizer",),
    "deepspeed.runtime.fp16.loss_scaler": ("CreateLossScaler", "LossScaler", "LossScalerBase"),
    "deepspeed.module_inject.auto_ep": ("AutoEP",),
    "deepspeed.module_inject.auto_ep_config": ("validate_autoep_config", "validate_autoep_post_detection"),
    "deepspeed.module_inject.auto_ep_layer": ("AutoEPMoELayer", "ReplacementSourceMap"),
    "deepspeed.moe.fused_expert_layout": ("classify_fused_gate_up_layout",),
    "deepspeed.runtime.engine": (
        *("ZERO_OPTIMIZATION", "_client_optimizer_needs_remap", "_model_parameters_need_remap"),
        *("_remap_client_optimizer_after_module_replacement", "_remap_model_parameters_after_module_replacement"),
    ),
    "deepspeed.runtime.dataloader": ("RepeatingLoader",),
    "deepspeed.runtime.keep_in_fp32": ("keep_in_fp32_pattern",),
    "deepspeed.runtime.pipe.engine.PipelineEngine": (
        *("_INSTRUCTION_MAP", "_aggregate_total_loss", "_broadcast_model", "_build_data_iter"),
        *("_cast_module_mixed_precision", "_configure_basic_optimizer", "_configure_distributed_model"),
        *("_configure_expert_parallel", "_configure_optimizer", "_configure_zero_optimizer"),
        *("_do_optimizer_sanity_check", "_exec_optimizer_step", "_exec_schedule", "_inference_schedule"),
        *("_is_supported_optimizer", "_loss_stage_global_rank", "_mixed_precision_dtypes", "_next_batch"),
        *("_scheduler_from_config", "_take_model_step", "_train_schedule", "communication_data_type", "compile"),
        *("destroy", "eval_batch", "get_global_grad_norm", "get_lr", "gradient_clipping", "is_first_stage"),
        *("is_last_stage", "load_checkpoint", "offload_states", "reload_states", "reset_activation_shape"),
        *("save_16bit_model", "save_checkpoint", "set_dataiterator", "set_dataloader", "set_train_batch_size"),
        *("steps_per_print", "train_batch", "train_batch_size", "wall_clock_breakdown"),
        *("zero_allow_untested_optimizer", "zero_optimization", "zero_optimization_stage", "zero_use_cpu_optimizer"),
    ),
    "deepspeed.runtime.pipe.engine": ("TRAIN_BATCH_TIMER",),
    "deepspeed.runtime.pipe.module": ("LayerSpec", "TiedLayerSpec"),
    "deepspeed.runtime.pipe.module.LayerSpec": ("build",),
    "deepspeed.runtime.pipe.module.PipelineModule": (
        *("_count_layer_params", "_find_layer_type", "_index_tied_modules", "_partition_layers"),
        *("_synchronize_tied_weights", "get_additional_losses", "stage_owner", "topology"),
    ),
    "deepspeed.runtime.lr_schedules": ("VALID_LR_SCHEDULES",),
    "deepspeed.runtime.pipe.schedule": ("PipeInstruction",),
    "deepspeed.runtime.pipe.schedule.PipeSchedule": ("num_pipe_buffers", "steps"),
    "deepspeed.runtime.pipe.topology.PipelineParallelGrid": (
        *("get_data_parallel_group", "get_pipe_parallel_group", "get_slice_parallel_group", "get_slice_parallel_rank"),
        *("get_slice_parallel_world_size", "stage_to_global"),
    ),
    "deepspeed.runtime.utils": ("is_model_parallel_parameter", "set_random_seed"),
    "deepspeed.runtime.tensor_parallel.init_utils": ("load_ds_config",),
    "deepspeed.runtime.zero.partition_parameters": (
        *("GatheredParameters", "ZeroParamStatus", "restore_init_context", "shutdown_init_context"),
        "top_level_context",
    ),
    "deepspeed.runtime.zero.partition_parameters.Init": ("_convert_to_deepspeed_param",),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": (
        *("get_fp32_grad_for_param", "get_full_hp_param", "get_local_fp32_grad_for_param", "get_local_fp32_param"),
        *("set_fp32_grad_for_param", "set_full_hp_param", "set_local_grad_for_param", "set_local_hp_param"),
        "update_fp32_grad_for_param_vectorized",
    ),
    "deepspeed.utils.logging": ("log_dist", "logger"),
    "deepspeed.utils.zero_to_fp32": (
        *("_get_fp32_state_dict_from_zero_checkpoint", "convert_zero_checkpoint_to_fp32_state_dict"),
    ),
}
"""The names that must exist in each module or class."""


def check_seams() -> None:
    """Raises ConfigError if DeepSpeed cannot be imported, or lacks a seam."""
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ImportError as error:
        raise ConfigError(f"deepspeed cannot be imported ({error}); install deepspeed=={TESTED_VERSION}") from None
    missing = missing_seams()
    if missing:
        raise ConfigError(
            f"deepspeed {deepspeed.__version__} lacks {', '.join(missing)}; ds_lgamp is tested with {TESTED_VERSION}, "
            f"install deepspeed=={TESTED_VERSION}"
        )


def missing_seams() -> list[str]:
    """The seams that the installed DeepSpeed lacks, such as ``PipelineEngine.train_batch``."""
    return missing_names(NAMES)


def all_seams() -> list[str]:
    """Every seam that :func:`missing_seams` looks for."""
    return [seam_label(owner, name) for owner, names in NAMES.items() for name in names]
