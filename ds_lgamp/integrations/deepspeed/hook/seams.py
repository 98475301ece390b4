"""The places in DeepSpeed that the integration overrides, calls or reads; whether the installed version has them."""

import importlib
import inspect
from collections.abc import Iterator

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.seams import label, lookup_label, missing_lookups, missing_names, resolve

TESTED_VERSION = "0.19.8"

NAMES: dict[str, tuple[str, ...]] = {
    "deepspeed": ("initialize",),
    "deepspeed.accelerator": ("get_accelerator",),
    "deepspeed.runtime.config": ("DeepSpeedConfig", "DtypeEnum"),
    "deepspeed.ops": ("__compatible_ops__",),
    "deepspeed.ops.adagrad": ("DeepSpeedCPUAdagrad",),
    "deepspeed.ops.adam": ("DeepSpeedCPUAdam", "FusedAdam"),
    "deepspeed.ops.lion": ("DeepSpeedCPULion", "FusedLion"),
    "deepspeed.runtime.base_optimizer": ("DeepSpeedOptimizer",),
    "deepspeed.runtime.fp16.loss_scaler": ("CreateLossScaler", "LossScaler", "LossScalerBase"),
    "deepspeed.runtime.engine": ("ZERO_OPTIMIZATION",),
    "deepspeed.runtime.dataloader": ("RepeatingLoader",),
    "deepspeed.runtime.keep_in_fp32": ("keep_in_fp32_pattern",),
    "deepspeed.runtime.pipe.engine.PipelineEngine": (
        "_INSTRUCTION_MAP",
        "_aggregate_total_loss",
        "_broadcast_model",
        "_build_data_iter",
        "_cast_module_mixed_precision",
        "_configure_basic_optimizer",
        "_configure_distributed_model",
        "_configure_zero_optimizer",
        "_do_optimizer_sanity_check",
        "_exec_optimizer_step",
        "_exec_schedule",
        "_inference_schedule",
        "_is_supported_optimizer",
        "_loss_stage_global_rank",
        "_mixed_precision_dtypes",
        "_next_batch",
        "_scheduler_from_config",
        "_train_schedule",
        "destroy",
        "eval_batch",
        "get_global_grad_norm",
        "get_lr",
        "gradient_clipping",
        "is_first_stage",
        "is_last_stage",
        "load_checkpoint",
        "reset_activation_shape",
        "save_checkpoint",
        "set_dataiterator",
        "set_dataloader",
        "steps_per_print",
        "train_batch",
        "wall_clock_breakdown",
        "zero_allow_untested_optimizer",
        "zero_optimization",
        "zero_optimization_stage",
    ),
    "deepspeed.runtime.pipe.engine": ("TRAIN_BATCH_TIMER",),
    "deepspeed.runtime.pipe.module": ("LayerSpec", "TiedLayerSpec"),
    "deepspeed.runtime.pipe.module.LayerSpec": ("build",),
    "deepspeed.runtime.pipe.module.PipelineModule": (
        "_count_layer_params",
        "_find_layer_type",
        "_index_tied_modules",
        "_partition_layers",
        "_synchronize_tied_weights",
        "get_additional_losses",
        "stage_owner",
        "topology",
    ),
    "deepspeed.runtime.lr_schedules": ("VALID_LR_SCHEDULES",),
    "deepspeed.runtime.pipe.schedule": ("PipeInstruction",),
    "deepspeed.runtime.pipe.schedule.PipeSchedule": ("num_pipe_buffers", "steps"),
    "deepspeed.runtime.pipe.topology.PipelineParallelGrid": (
        "get_data_parallel_group",
        "get_pipe_parallel_group",
        "get_slice_parallel_group",
        "get_slice_parallel_rank",
        "get_slice_parallel_world_size",
        "stage_to_global",
    ),
    "deepspeed.runtime.utils": ("is_model_parallel_parameter", "set_random_seed"),
    "deepspeed.runtime.tensor_parallel.init_utils": ("load_ds_config",),
    "deepspeed.runtime.zero.partition_parameters": (
        "GatheredParameters",
        "ZeroParamStatus",
        "restore_init_context",
        "shutdown_init_context",
        "top_level_context",
    ),
    "deepspeed.runtime.zero.partition_parameters.Init": ("_convert_to_deepspeed_param",),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": (
        "get_fp32_grad_for_param",
        "get_full_hp_param",
        "get_local_fp32_grad_for_param",
        "get_local_fp32_param",
        "set_fp32_grad_for_param",
        "set_full_hp_param",
        "set_local_grad_for_param",
        "set_local_hp_param",
        "update_fp32_grad_for_param_vectorized",
    ),
    "deepspeed.utils.logging": ("log_dist", "logger"),
}
"""By module or class, what must exist in it."""

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "deepspeed.runtime.dataloader.RepeatingLoader": ("data_iter", "loader"),
    "deepspeed.runtime.pipe.engine.PipelineEngine": (
        "_compute_loss",
        "agg_additional_losses",
        "data_iterator",
        "data_parallel_group",
        "device",
        "dp_group_loss",
        "dp_world_size",
        "eval_return_logits",
        "fwd_outputs",
        "global_samples",
        "global_steps",
        "grid",
        "lr_scheduler",
        "micro_batches",
        "micro_steps",
        "monitor",
        "outputs",
        "skipped_steps",
        "stage_id",
        "timers",
        "total_additional_losses",
        "total_loss",
        "training_data",
    ),
    "deepspeed.runtime.pipe.module.PipelineModule": (
        "_grid",
        "_layer_specs",
        "_local_start",
        "_local_stop",
        "_num_layers",
        "base_seed",
        "dynamic_shape",
        "forward_funcs",
        "fwd_map",
        "local_rank",
        "loss_fn",
        "micro_offset",
        "num_stages",
        "parts",
        "seed_fn",
        "seed_layers",
        "stage_id",
        "tied_comms",
        "tied_modules",
        "tied_weight_attrs",
        "world_group",
    ),
    "deepspeed.runtime.pipe.topology.PipelineParallelGrid": ("pipe_groups",),
    "deepspeed.runtime.zero.partition_parameters.GatheredParameters": (
        "all_gather",
        "ds_id",
        "ds_process_group",
        "partition",
    ),
}
"""By class, what its methods must set or use on their instances."""


LOOKUPS = ("DeepSpeedConfig", "PipelineEngine", "DeepSpeedEngine", "DeepSpeedHybridEngine", "DualPipeVEngine")
"""Module-global names that ``deepspeed.initialize`` must look up when it is called."""
_INITIALIZE = "deepspeed.initialize"


def check_seams() -> None:
    """Raises ConfigError if DeepSpeed is absent or of a version the integration does not fit."""
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
    """The seams the installed DeepSpeed lacks, by class or module and name."""
    missing = missing_names(NAMES)
    for owner, names in ATTRIBUTES.items():
        used = set(_names_in_methods(resolve(owner)))
        missing += [label(owner, name) for name in names if name not in used]
    return missing + missing_lookups({_INITIALIZE: LOOKUPS})


def all_seams() -> list[str]:
    """Every seam that :func:`missing_seams` looks for."""
    seams = [label(owner, name) for table in (NAMES, ATTRIBUTES) for owner, names in table.items() for name in names]
    return [*seams, *(lookup_label(name, _INITIALIZE) for name in LOOKUPS)]


def _names_in_methods(owner: object) -> Iterator[str]:
    """Every attribute name the methods of a class and of its bases in DeepSpeed mention."""
    for base in inspect.getmro(owner) if isinstance(owner, type) else ():
        if base.__module__.startswith("deepspeed"):
            for member in vars(base).values():
                function = member.fget if isinstance(member, property) else member
                code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
                yield from code.co_names if code is not None else ()
