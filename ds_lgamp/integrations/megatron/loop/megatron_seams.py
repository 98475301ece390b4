"""The seams: what the integration replaces, calls or reads in Megatron-core and in Megatron-LM's training loop.

They are checked before anything is installed. What functions of Megatron-LM look up, tests/integrations/test_seams.py
reads in its tree.
"""

import dataclasses
import importlib
import inspect

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.hosts import missing_names, missing_parameters, resolve

TESTED_VERSIONS = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
"""The releases with which Megatron-LM's pretrain_gpt.py was trained. From 0.17 on they need Python 3.12."""
TESTED = " or ".join([", ".join(TESTED_VERSIONS[:-1]), TESTED_VERSIONS[-1]])

NAMES = {
    "megatron.core.enums": ("ModelType",),
    "megatron.core.parallel_state": ("initialize_model_parallel", "set_virtual_pipeline_model_parallel_world_size"),
    "megatron.core.pipeline_parallel.schedules": ("get_forward_backward_func",),
    "megatron.core.process_groups_config.ProcessGroupCollection": ("use_mpu_process_groups",),
    "megatron.core.transformer.enums.LayerType": ("decoder",),
    "megatron.core.transformer.pipeline_parallel_layer_layout.PipelineParallelLayerLayout": (
        "get_num_stages_from_str",
    ),
    "megatron.core.utils": ("get_model_config", "get_model_type", "unwrap_model"),
}
"""The names that must exist in each module or class."""

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_STAGE = ("config", "vp_stage", "pp_rank")
PARAMETERS: dict[str, tuple[str, ...]] = {
    f"{_SCHEDULES}.check_first_val_step": ("first_val_step", "forward_only", "cond"),
    f"{_SCHEDULES}.clear_embedding_activation_buffer": ("config", "model", "is_last_stage"),
    f"{_SCHEDULES}.finish_embedding_wgrad_compute": ("config", "embedding_module", "is_last_stage", "tp_group"),
    f"{_SCHEDULES}.forward_step": (
        *("forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor", "forward_data_store"),
        *("config", "cp_group_size", "collect_non_loss_data", "checkpoint_activations_microbatch"),
        *("is_first_microbatch", "current_microbatch", "vp_stage", "is_last_stage"),
    ),
    "megatron.core.transformer.transformer_block.get_num_layers_to_build": _STAGE,
    "megatron.core.transformer.transformer_layer.get_transformer_layer_offset": _STAGE,
}
"""The parameters of each function, in order. Later releases may add optional ones."""

_INTERFACE = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)
"""Megatron-core's schedules. Their parameters must be those of ``ForwardBackward``, no less and no more."""

CONFIG_FIELDS = (
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "barrier_with_L1_time"),
    *("calculate_per_token_loss", "finalize_model_grads_func", "grad_scale_func", "grad_sync_func", "hidden_size"),
    *("no_sync_func", "num_layers", "param_sync_func", "pipeline_dtype", "pipeline_model_parallel_layout"),
    *("pipeline_model_parallel_size", "sequence_parallel", "timers", "variable_seq_lengths"),
    "virtual_pipeline_model_parallel_size",
)
"""The fields of TransformerConfig that the integration reads."""

_OPTIMIZER = "megatron.core.optimizer"
SHARDING_NAMES = {
    f"{_OPTIMIZER}.optimizer.Float16OptimizerWithFloat16Params": (
        *("_collect_main_grad_data_for_unscaling", "_copy_main_params_to_model_params"),
        *("_copy_model_grads_to_main_grads", "_copy_model_params_to_main_params"),
    ),
    f"{_OPTIMIZER}.optimizer.MixedPrecisionOptimizer": ("get_grad_norm", "prepare_grads", "step_with_ready_grads"),
    f"{_OPTIMIZER}.optimizer": ("param_group_identifier_keys",),
    "megatron.core.distributed.DistributedDataParallel": (
        *("broadcast_params", "disable_forward_pre_hook", "enable_forward_pre_hook", "finish_grad_sync"),
        *("scale_gradients", "zero_grad_buffer"),
    ),
    "megatron.core.rerun_state_machine": ("get_rerun_state_machine",),
}
"""The same for stages 2 and 3."""
SHARDING_PARAMETERS: dict[str, tuple[str, ...]] = {
    f"{_OPTIMIZER}._get_param_groups": ("model_chunks", "config", "config_overrides"),
    f"{_OPTIMIZER}.clip_grads.clip_grad_by_total_norm_fp32": (
        *("parameters", "max_norm", "total_norm", "use_decoupled_grad"),
    ),
    f"{_OPTIMIZER}.get_megatron_optimizer": (
        *("config", "model_chunks", "config_overrides", "use_gloo_process_groups", "pg_collection"),
        "dump_param_to_param_group_map",
    ),
}
"""The same for stages 2 and 3, but none may have more."""

TRAINING_PARAMETERS = {
    "megatron.training.checkpointing._load_base_checkpoint": (
        *("load_dir", "args", "rank0", "sharded_state_dict", "checkpointing_context"),
    ),
    "megatron.training.training.dummy_train_step": ("data_iterator",),
    "megatron.training.training.evaluate": (
        *("forward_step_func", "data_iterator", "model", "process_non_loss_data_func", "config", "verbose"),
        *("non_loss_data_func", "eval_iters"),
    ),
    "megatron.training.arguments.validate_args": ("args", "defaults"),
    "megatron.training.training.get_model": (
        *("model_provider_func", "model_type", "wrap_with_ddp", "config", "pg_collection"),
    ),
}
"""The parameters of each function of Megatron-LM, in order. Later releases may add optional ones."""
BUILDERS = "megatron.training.models.dist_utils"
"""The builders of models, which releases from 0.18 on have."""
BUILDER_PARAMETERS = {
    f"{BUILDERS}.build_virtual_pipeline_stages": ("build_model_func", "pg_collection", "vp_size", "model_type"),
}
"""The same for the builders."""
BUILDER_NAMES = {BUILDERS: ("unimodal_build_distributed_models",)}


def check_seams() -> None:
    """Raises ConfigError if Megatron-core cannot be imported, or lacks a seam."""
    try:
        core = importlib.import_module("megatron.core")
    except ImportError as error:
        raise ConfigError(
            f"megatron.core cannot be imported ({error}); install megatron-core=={TESTED_VERSIONS[0]}"
        ) from None
    refuse(missing_seams(), f"megatron-core {core.__version__}")


def check_sharding_seams() -> None:
    """Raises ConfigError if Megatron-core lacks a seam of stages 2 and 3."""
    refuse(missing_names(SHARDING_NAMES) + missing_parameters(SHARDING_PARAMETERS), "this megatron-core")


def check_training_seams() -> None:
    """Raises ConfigError if there is no Megatron-LM beside the script, or if it lacks a seam."""
    try:
        importlib.import_module("megatron.training.training")
    except ImportError as error:
        raise ConfigError(
            f"megatron.training cannot be imported ({error}); run a script of Megatron-LM's tree, or install "
            "megatron-core 0.17 or newer, whose package has it"
        ) from None
    missing = missing_parameters(TRAINING_PARAMETERS, optional_rest=True)
    if resolve(BUILDERS) is not None:
        missing += missing_parameters(BUILDER_PARAMETERS, optional_rest=True) + missing_names(BUILDER_NAMES)
    refuse(missing, f"the Megatron-LM of megatron-core {importlib.import_module('megatron.core').__version__}")


def missing_seams() -> list[str]:
    """Returns the seams that the installed Megatron-core lacks."""
    missing = missing_names(NAMES) + missing_parameters(PARAMETERS, optional_rest=True)
    config = resolve("megatron.core.transformer.TransformerConfig")
    fields = {field.name for field in dataclasses.fields(config)} if config is not None else set()
    missing += [f"TransformerConfig.{name}" for name in CONFIG_FIELDS if name not in fields]
    if missing:
        return missing
    # Without the other seams, the import would fail.
    from ds_lgamp.integrations.megatron.loop.forward_backward import ForwardBackward

    wanted = tuple(inspect.signature(ForwardBackward.__call__).parameters)[1:]
    return missing_parameters({f"{_SCHEDULES}.{name}": wanted for name in _INTERFACE})


def refuse(missing: list[str], host: str) -> None:
    """Raises ConfigError if any seam of ``host`` is missing."""
    if missing:
        raise ConfigError(f"{host} lacks {', '.join(missing)}; ds_lgamp is tested with {TESTED}; install one")
