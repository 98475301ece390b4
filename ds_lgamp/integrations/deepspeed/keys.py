"""Every key of ds_config.json that DeepSpeed 0.19.8 reads, and what a ``ds_lgamp`` block makes of it."""

from enum import Enum
from typing import Any, NamedTuple


class Treatment(str, Enum):
    """What becomes of a key."""

    HONOURED = "honoured"
    MEANINGLESS = "meaningless"
    """It tunes machinery that ds_lgamp replaces; results do not depend on it."""
    REFUSED = "refused"
    """Ignoring it would change results, the place of memory or a feature the user counts on."""


class Key(NamedTuple):
    """One row of the table.

    Args:
        name: dotted path; ``section.*`` stands for all keys of a section that have no row of their own. A refused
            section is refused as a whole, unless its ``enabled`` is false.
        note: what it does or its limits; why it is meaningless; why it is refused and what to do instead.
        harmless: the values at which a refused key changes nothing, or the only ones an honoured key may have. None
            always passes.
    """

    name: str
    treatment: Treatment
    note: str = ""
    harmless: tuple[Any, ...] = ()


HONOURED, MEANINGLESS, REFUSED = Treatment.HONOURED, Treatment.MEANINGLESS, Treatment.REFUSED


def _keys(section: str, names: str, treatment: Treatment, note: str = "", harmless: tuple[Any, ...] = ()) -> list[Key]:
    """Rows that differ in the name only; ``names`` is a list of words."""
    prefix = f"{section}." if section else ""
    return [Key(prefix + name, treatment, note, harmless) for name in names.split()]


_SO_FAR = "a ds_lgamp block does not support it so far; remove it"
_USE_BF16 = "a ds_lgamp block does not support it so far; use bf16 or remove it"
_REMOVED = "DeepSpeed has removed it and refuses it; remove it"
_PROGRAM = "gathers, reductions and releases follow the program"
_OWN_FORMAT = "checkpoints have a format of their own"
_STOCK_IGNORES = "DeepSpeed does not use it either; PipelineModule has an argument for it"

_TRAINING = (
    Key("ds_lgamp", HONOURED, "the block"),
    *_keys("", "train_batch_size train_micro_batch_size_per_gpu", HONOURED),
    Key("gradient_accumulation_steps", HONOURED, "the micro-batches of a step"),
    Key("managed_gradient_accumulation", REFUSED, "a pipeline steps once per batch; remove it", (True,)),
    Key("dataloader_drop_last", HONOURED),
    Key("gradient_clipping", HONOURED, "by the norm of the whole model's gradient; 1.0 if absent, as in DeepSpeed"),
    Key("optimizer.type", HONOURED, "optimizers that update each element by itself"),
    Key("optimizer.params", HONOURED),
    Key("optimizer.legacy_fusion", MEANINGLESS, "only with fp16.enabled"),
    *_keys("scheduler", "type params", HONOURED),
    Key("zero_allow_untested_optimizer", HONOURED, "vouches that the optimizer updates each element by itself"),
    Key("zero_force_ds_cpu_optimizer", MEANINGLESS, "only with offloading"),
    Key("prescale_gradients", MEANINGLESS, "gradients are divided in an order of their own"),
    Key("gradient_predivide_factor", MEANINGLESS, "gradients are divided in an order of their own"),
    Key("gradient_allreduce_op", REFUSED, "gradients are averaged over data-parallel ranks; remove it", ("mean",)),
    Key("communication_data_type", REFUSED, _SO_FAR),
    Key("disable_allgather", MEANINGLESS, "DeepSpeed does not use it either"),
    Key("allgather_size", MEANINGLESS, _PROGRAM),
)

_REPORTS = (
    Key("steps_per_print", HONOURED),
    Key("wall_clock_breakdown", HONOURED, "needs steps_per_print, as in DeepSpeed"),
    Key("memory_breakdown", HONOURED, "reports memory while the engine is built, not around a forward or backward"),
    *_keys("", "dump_state log_level disable_python_gc", HONOURED),
    Key("vocabulary_size", HONOURED, "DeepSpeed warns if 8 does not divide it"),
    *_keys("timers.throughput", "enabled synchronized", MEANINGLESS, "DeepSpeed's pipelines do not report it either"),
    *_keys("tensorboard", "enabled output_path job_name", HONOURED),
    *_keys("wandb", "enabled group team project", HONOURED),
    *_keys("csv_monitor", "enabled output_path job_name", HONOURED),
    *_keys("comet", "enabled samples_log_interval project workspace api_key experiment_name", HONOURED),
    *_keys("comet", "experiment_key online mode", HONOURED),
    Key(
        "comms_logger.enabled",
        REFUSED,
        "gathers and reductions do not pass through deepspeed.comm; remove it and use ds_lgamp run --measure",
        (False,),
    ),
    *_keys("comms_logger", "prof_all prof_ops verbose debug", MEANINGLESS, "only with comms_logger.enabled"),
    Key("flops_profiler.enabled", REFUSED, "it measures engine.forward, which is not called; remove it", (False,)),
    Key("flops_profiler.*", MEANINGLESS, "only with flops_profiler.enabled"),
    Key("autotuning.enabled", REFUSED, "it searches over settings of stock DeepSpeed; remove it", (False,)),
    Key("autotuning.*", MEANINGLESS, "only with autotuning.enabled"),
)

_FP32 = ("fp32", "float32", "float", "torch.float32")
_BF16 = ("bf16", "bfloat16", "torch.bfloat16")
_PRECISION = (
    Key("bf16.enabled", HONOURED, "the optimizer updates fp32 copies of bf16 parameters"),
    Key("bf16.check_grad_overflow", HONOURED, "skips a step whose gradient is not finite"),
    Key("bf16.immediate_grad_update", MEANINGLESS, "gradients accumulate as the program says"),
    *_keys(
        "bf16",
        "bf16_master_weights_and_grads bf16_optimizer_states",
        REFUSED,
        "the optimizer updates fp32 copies of the parameters; remove it",
        (False,),
    ),
    Key("bfloat16.*", HONOURED, "old name of bf16"),
    Key("fp16.enabled", REFUSED, _USE_BF16, (False,)),
    *_keys(
        "fp16",
        "auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale "
        "fp16_master_weights_and_grads",
        MEANINGLESS,
        "only with fp16.enabled",
    ),
    Key("torch_autocast.enabled", REFUSED, _USE_BF16, (False,)),
    *_keys("torch_autocast", "dtype lower_precision_safe_modules", MEANINGLESS, "only with torch_autocast.enabled"),
    Key("data_types.grad_accum_dtype", HONOURED, "fp32 or bf16", (*_FP32, *_BF16)),
    Key("data_types.param_dtype", HONOURED, "must agree with bf16.enabled, as in DeepSpeed"),
    Key("data_types.buffer_dtype", HONOURED, "with bf16.enabled"),
    Key("data_types.keep_in_fp32_modules", HONOURED, "with bf16.enabled; concerns buffers only, as in DeepSpeed"),
)

_ZERO = (
    Key("zero_optimization.stage", HONOURED, "0 to 3, all with pipelines"),
    *_keys(
        "zero_optimization",
        "overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
        "allgather_partitions allgather_bucket_size round_robin_gradients parameter_alignment legacy_stage1 "
        "memory_efficient_linear override_module_apply log_trace_cache_warnings enable_sanity_checks",
        MEANINGLESS,
        _PROGRAM,
    ),
    *_keys(
        "zero_optimization",
        "stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold "
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold "
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential prefetch_bucket_size "
        "param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance "
        "module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential",
        MEANINGLESS,
        "what is gathered and when it is released follows ds_lgamp.resident_chunks",
    ),
    *_keys("zero_optimization.leaf_module", "classes names name_suffixes", MEANINGLESS, "chunks are gathered whole"),
    Key("zero_optimization.compute_grad_norm", MEANINGLESS, "the norm is always computed"),
    *_keys(
        "zero_optimization",
        "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save",
        MEANINGLESS,
        "engine.module.state_dict() always gathers",
    ),
    *_keys(
        "zero_optimization",
        "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint",
        MEANINGLESS,
        _OWN_FORMAT,
    ),
    *_keys(
        "zero_optimization",
        "sub_group_size cpu_offload_use_pin_memory save_muon_momentum_buffer_in_memory",
        MEANINGLESS,
        "only with offloading",
    ),
    Key("zero_optimization.ignore_unused_parameters", REFUSED, "nothing looks for unused ones; remove it", (True,)),
    *_keys("zero_optimization", "offload_optimizer.device offload_param.device", REFUSED, _SO_FAR, ("none",)),
    *_keys(
        "zero_optimization.offload_optimizer",
        "nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload "
        "cpuadam_cores_perc",
        MEANINGLESS,
        "only with offload_optimizer.device",
    ),
    *_keys(
        "zero_optimization.offload_param",
        "nvme_path buffer_count buffer_size max_in_cpu pin_memory",
        MEANINGLESS,
        "only with offload_param.device",
    ),
    *_keys("zero_optimization", "cpu_offload cpu_offload_param", REFUSED, _SO_FAR, (False,)),
    Key("zero_optimization.zenflow.*", REFUSED, "it postpones part of the update; remove it"),
    Key("zero_optimization.zero_hpz_partition_size", REFUSED, _SO_FAR, (0, 1)),
    *_keys(
        "zero_optimization",
        "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients",
        REFUSED,
        "weights and gradients travel unquantized; remove it",
        (False,),
    ),
    *_keys("zero_optimization", "mics_shard_size mics_hierarchical_params_gather zeropp_loco_param", REFUSED, _REMOVED),
    Key("aio.*", MEANINGLESS, "only with offloading"),
)

_PARALLELISM = (
    *_keys("pipeline", "stages partition seed_layers", MEANINGLESS, _STOCK_IGNORES),
    *_keys("pipeline", "activation_checkpoint_interval use_reentrant", MEANINGLESS, "ds_lgamp.recompute decides"),
    *_keys("pipeline", "pipe_partitioned grad_partitioned", MEANINGLESS, "only with tensor parallelism"),
    Key("activation_checkpointing.cpu_checkpointing", REFUSED, "stored inputs stay on the device; remove it", (False,)),
    *_keys(
        "activation_checkpointing",
        "partition_activations number_checkpoints contiguous_memory_optimization synchronize_checkpoint_boundary "
        "profile",
        MEANINGLESS,
        "ds_lgamp.recompute decides",
    ),
    Key("tensor_parallel.autotp_size", REFUSED, "AutoTP does not cut pipelines; remove it", (0, 1)),
    Key("tensor_parallel.*", MEANINGLESS, "only with tensor_parallel.autotp_size"),
    Key("expert_parallel.enabled", REFUSED, _SO_FAR, (False,)),
    Key("expert_parallel.*", MEANINGLESS, "only with expert_parallel.enabled"),
    Key("use_data_before_expert_parallelism", MEANINGLESS, "only with expert parallelism"),
    Key("sequence_parallel_size", REFUSED, _SO_FAR, (1,)),
    Key("seq_parallel_communication_data_type", MEANINGLESS, "only with sequence parallelism"),
    Key("data_parallel_size", MEANINGLESS, "the module's topology decides"),
    Key("compile.deepcompile", REFUSED, "it replaces ZeRO inside the compiled graph; remove it", (False,)),
    Key("compile.*", MEANINGLESS, "only with compile.deepcompile"),
    Key("hybrid_engine.enabled", REFUSED, "it is another engine; remove it", (False,)),
    Key("hybrid_engine.*", MEANINGLESS, "only with hybrid_engine.enabled"),
)

_DATA_AND_CHECKPOINTS = (
    *_keys(
        "data_efficiency",
        "enabled data_sampling.enabled data_sampling.curriculum_learning.enabled "
        "data_sampling.dynamic_batching.enabled data_routing.enabled data_routing.random_ltd.enabled",
        REFUSED,
        _SO_FAR,
        (False,),
    ),
    Key("data_efficiency.*", MEANINGLESS, "only with data_efficiency.enabled"),
    Key("weight_quantization.*", REFUSED, "weights are not quantized; remove it"),
    *_keys(
        "checkpoint",
        "tag_validation parallel_write.pipeline_stage checkpoint_serialization",
        MEANINGLESS,
        _OWN_FORMAT,
    ),
    Key("checkpoint.use_node_local_storage", REFUSED, "all ranks write to one folder; remove it", (False,)),
    Key("checkpoint.load_universal", REFUSED, _SO_FAR, (False,)),
    Key("checkpoint.writer.*", REFUSED, f"{_OWN_FORMAT}; remove it"),
    Key("datastates_ckpt", REFUSED, f"{_OWN_FORMAT}; remove it", (False,)),
    *_keys(
        "",
        "nebula compression_training amp quantize_training sparse_gradients eigenvalue sparse_attention elasticity "
        "graph_harvesting curriculum_learning progressive_layer_drop",
        REFUSED,
        _REMOVED,
    ),
)

KEYS: tuple[Key, ...] = (*_TRAINING, *_REPORTS, *_PRECISION, *_ZERO, *_PARALLELISM, *_DATA_AND_CHECKPOINTS)
