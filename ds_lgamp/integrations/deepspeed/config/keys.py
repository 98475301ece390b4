"""A table of every key of ds_config.json that DeepSpeed 0.19.8 reads, with its treatment beside a ``ds_lgamp``
block."""

from collections.abc import Callable, Iterator
from enum import Enum
from math import inf
from numbers import Integral, Real
from typing import Any, NamedTuple


class Treatment(str, Enum):
    """How a key is treated beside a ``ds_lgamp`` block."""

    HONOURED = "honoured"
    MEANINGLESS = "meaningless"
    """The key tunes machinery that ds_lgamp replaces. Results do not depend on it."""
    REFUSED = "refused"
    """Ignoring the key would change results, move memory elsewhere, or drop a feature that the user relies on."""


class Key(NamedTuple):
    """One row of the table.

    Args:
        name: the dotted path. ``section.*`` stands for all keys of a section that have no row of their own; if it is
            refused, the section is refused as a whole, unless its ``enabled`` is false.
        note: the effect and the limits of an honoured key; why a key is meaningless; why a key is refused, and the fix.
        harmless: the values at which a refused key changes nothing, or the only values that an honoured key may have.
        takes: the kind of value that the key takes, one of :data:`VALUES`; "" for any value.

    A key that is null counts as absent.
    """

    name: str
    treatment: Treatment
    note: str = ""
    harmless: tuple[Any, ...] = ()
    takes: str = ""


COUNT, INDEX, AMOUNT, SWITCH = "a whole number from 1", "a whole number from 0", "a number from 0", "true or false"
NAME, OBJECT, STAGE = "a name in quotes", "an object such as {}", "0, 1, 2 or 3"
SHARE = "a number from 0 to 1"
INTERVAL, GROUP = "a whole number from 1, or Infinity", "a whole number from 1, or -1 for none"
VALUES: dict[str, Callable[[Any], bool]] = {
    COUNT: lambda value: _whole(value) and value >= 1,
    INDEX: lambda value: _whole(value) and value >= 0,
    AMOUNT: lambda value: isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < inf,
    SHARE: lambda value: VALUES[AMOUNT](value) and value <= 1,
    SWITCH: lambda value: isinstance(value, bool),
    NAME: lambda value: isinstance(value, str),
    OBJECT: lambda value: isinstance(value, dict),
    STAGE: lambda value: _whole(value) and 0 <= value <= 3,
    # Accelerate sets infinity for "never".
    INTERVAL: lambda value: value == inf or (_whole(value) and value >= 1),
    GROUP: lambda value: _whole(value) and (value >= 1 or value == -1),
}
"""The kinds of values, each with its test."""


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


HONOURED, MEANINGLESS, REFUSED = Treatment.HONOURED, Treatment.MEANINGLESS, Treatment.REFUSED


def _keys(
    section: str,
    names: str,
    treatment: Treatment,
    note: str = "",
    harmless: tuple[Any, ...] = (),
    takes: str = "",
) -> list[Key]:
    """Rows that differ only in their names. ``names`` holds the names, separated by spaces."""
    prefix = f"{section}." if section else ""
    return [Key(prefix + name, treatment, note, harmless, takes) for name in names.split()]


def _switched(name: str, note: str, harmless: tuple[Any, ...] = (False,)) -> Iterator[Key]:
    """Yields a key that is refused because it switches its section on, and the rest of the section."""
    yield Key(name, REFUSED, note, harmless)
    yield Key(f"{name.partition('.')[0]}.*", MEANINGLESS, f"only with {name}")


_SO_FAR = "a ds_lgamp block does not support it so far; remove it"
_USE_BF16 = "a ds_lgamp block does not support it so far; use bf16 or remove it"
_REMOVED = "DeepSpeed has removed it and refuses it; remove it"
_PROGRAM = "gathers, reductions and releases follow the program"
_OWN_FORMAT = "checkpoints have a format of their own"
_PINNED = "what travels is always in pinned memory"
_THREADS = "two units of the disk are in memory, one that is read and one that is written"
_STOCK_IGNORES = "DeepSpeed does not use it either; PipelineModule has an argument for it"

_TRAINING = (
    Key("ds_lgamp", HONOURED, "the block"),
    *_keys("", "train_batch_size train_micro_batch_size_per_gpu", HONOURED, takes=COUNT),
    Key("gradient_accumulation_steps", HONOURED, "the micro-batches of a step", takes=COUNT),
    Key("managed_gradient_accumulation", REFUSED, "a pipeline steps once per batch; remove it", (True,)),
    Key("dataloader_drop_last", HONOURED, takes=SWITCH),
    Key(
        "gradient_clipping",
        HONOURED,
        "by the norm of the whole model's gradient; 1.0 if absent, as in DeepSpeed",
        takes=AMOUNT,
    ),
    Key(
        "optimizer.type",
        HONOURED,
        "optimizers that update each element by itself, with torch's or apex's fused kernels; Lion, DeepSpeedCPUAdam "
        "and Adam without bias_correction are DeepSpeed's own, which it compiles; Lamb and Muon are ds_lgamp's",
        takes=NAME,
    ),
    Key("optimizer.params", HONOURED, "torch_adam is torch's Adam as DeepSpeed makes it, not fused", takes=OBJECT),
    Key("optimizer.legacy_fusion", MEANINGLESS, "DeepSpeed's fp16 optimizers are not used"),
    Key("scheduler.type", HONOURED, takes=NAME),
    Key("scheduler.params", HONOURED, takes=OBJECT),
    Key(
        "zero_allow_untested_optimizer",
        HONOURED,
        "vouches that the optimizer updates each element by itself",
        takes=SWITCH,
    ),
    Key(
        "zero_force_ds_cpu_optimizer", MEANINGLESS, "the host updates with any optimizer that takes one chunk at a time"
    ),
    Key("prescale_gradients", MEANINGLESS, "gradients are divided in an order of their own"),
    Key("gradient_predivide_factor", MEANINGLESS, "gradients are divided in an order of their own"),
    Key("gradient_allreduce_op", REFUSED, "gradients are averaged over data-parallel ranks; remove it", ("mean",)),
    Key("communication_data_type", HONOURED, "fp32, fp16 or bf16", ("fp32", "fp16", "bf16")),
    Key("disable_allgather", MEANINGLESS, "DeepSpeed does not use it either"),
    Key("allgather_size", MEANINGLESS, _PROGRAM),
)

_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
_REPORTS = (
    Key("steps_per_print", HONOURED, takes=INTERVAL),
    Key(
        "wall_clock_breakdown",
        HONOURED,
        "needs steps_per_print; a line of ds_lgamp has the times of all work and waits, and DeepSpeed's own lines are "
        "right for the step only",
        takes=SWITCH,
    ),
    Key(
        "memory_breakdown",
        HONOURED,
        "reports memory while the engine is built, not around a forward or backward",
        takes=SWITCH,
    ),
    *_keys("", "dump_state disable_python_gc", HONOURED, takes=SWITCH),
    Key("log_level", HONOURED, "debug, info, warning, error or critical", _LOG_LEVELS),
    Key("vocabulary_size", HONOURED, "DeepSpeed warns if 8 does not divide it", takes=COUNT),
    *_keys("timers.throughput", "enabled synchronized", MEANINGLESS, "DeepSpeed's pipelines do not report it either"),
    *_keys("", "tensorboard.enabled wandb.enabled csv_monitor.enabled comet.enabled", HONOURED, takes=SWITCH),
    *_keys("tensorboard", "output_path job_name", HONOURED),
    *_keys("wandb", "group team project", HONOURED),
    *_keys("csv_monitor", "output_path job_name", HONOURED),
    *_keys("comet", "samples_log_interval project workspace api_key experiment_name", HONOURED),
    *_keys("comet", "experiment_key online mode", HONOURED),
    Key(
        "comms_logger.enabled",
        REFUSED,
        "gathers and reductions do not pass through deepspeed.comm; remove it and use ds_lgamp run --measure",
        (False,),
    ),
    *_keys("comms_logger", "prof_all prof_ops verbose debug", MEANINGLESS, "only with comms_logger.enabled"),
    *_switched("flops_profiler.enabled", "it measures engine.forward, which computes no layers here; remove it"),
    *_switched("autotuning.enabled", "it searches over settings of stock DeepSpeed; remove it"),
)

_TYPES = (
    *("fp32", "float32", "float", "torch.float32"),
    *("fp16", "float16", "half", "torch.float16"),
    *("bf16", "bfloat16", "torch.bfloat16"),
)
_PRECISION = (
    Key("bf16.enabled", HONOURED, "the optimizer updates fp32 copies of bf16 parameters by default", takes=SWITCH),
    Key("bf16.check_grad_overflow", HONOURED, "skips a step whose gradient is not finite", takes=SWITCH),
    Key("bf16.immediate_grad_update", MEANINGLESS, "gradients accumulate as the program says"),
    Key(
        "bf16.bf16_master_weights_and_grads",
        HONOURED,
        "the optimizer updates the bf16 parameters, without copies; together with bf16_optimizer_states",
        takes=SWITCH,
    ),
    Key("bf16.bf16_optimizer_states", HONOURED, "bf16, together with bf16_master_weights_and_grads", takes=SWITCH),
    Key("bfloat16.*", HONOURED, "old name of bf16"),
    Key("fp16.enabled", HONOURED, "the optimizer updates fp32 copies of fp16 parameters", takes=SWITCH),
    Key("fp16.auto_cast", HONOURED, "casts the inputs of the first layer to fp16", takes=SWITCH),
    Key("fp16.loss_scale", HONOURED, "0 for a dynamic one", takes=AMOUNT),
    Key("fp16.initial_scale_power", HONOURED, "of a dynamic loss scale", takes=INDEX),
    *_keys("fp16", "loss_scale_window hysteresis min_loss_scale", HONOURED, "of a dynamic loss scale", takes=COUNT),
    Key("fp16.consecutive_hysteresis", HONOURED, "of a dynamic loss scale", takes=SWITCH),
    Key(
        "fp16.fp16_master_weights_and_grads",
        REFUSED,
        "the optimizer updates fp32 copies of the parameters; remove it",
        (False,),
    ),
    Key("torch_autocast.enabled", REFUSED, _USE_BF16, (False,)),
    *_keys("torch_autocast", "dtype lower_precision_safe_modules", MEANINGLESS, "only with torch_autocast.enabled"),
    Key("data_types.grad_accum_dtype", HONOURED, "fp32, fp16 or bf16", _TYPES),
    Key(
        "data_types.param_dtype",
        HONOURED,
        "fp32, fp16 or bf16, in agreement with fp16.enabled and bf16.enabled",
        _TYPES,
    ),
    Key("data_types.buffer_dtype", HONOURED, "fp32, fp16 or bf16, with fp16.enabled or bf16.enabled", _TYPES),
    Key(
        "data_types.keep_in_fp32_modules",
        HONOURED,
        "with fp16.enabled or bf16.enabled; concerns buffers only, as in DeepSpeed",
    ),
)

_ZERO = (
    Key("zero_optimization.stage", HONOURED, "0 to 3, all with pipelines", takes=STAGE),
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
        "cpu_offload_use_pin_memory save_muon_momentum_buffer_in_memory",
        MEANINGLESS,
        "only with offloading",
    ),
    Key("zero_optimization.sub_group_size", MEANINGLESS, "a rank's shards are updated together"),
    Key("zero_optimization.ignore_unused_parameters", REFUSED, "nothing looks for unused ones; remove it", (True,)),
    Key(
        "zero_optimization.offload_optimizer.device",
        HONOURED,
        "cpu or nvme (at stages 1 to 3, with an optimizer that takes one chunk at a time) or none",
        ("none", "cpu", "nvme"),
    ),
    Key(
        "zero_optimization.offload_param.device",
        HONOURED,
        "cpu or nvme (with offload_optimizer) or none",
        ("none", "cpu", "nvme"),
    ),
    *_keys(
        "zero_optimization",
        "offload_optimizer.nvme_path offload_param.nvme_path",
        HONOURED,
        "a folder on the disk, with device nvme",
        takes=NAME,
    ),
    *_keys("zero_optimization", "offload_optimizer.pin_memory offload_param.pin_memory", MEANINGLESS, _PINNED),
    *_keys(
        "zero_optimization.offload_optimizer",
        "buffer_count pipeline_read pipeline_write fast_init",
        MEANINGLESS,
        _THREADS,
    ),
    *_keys("zero_optimization.offload_param", "buffer_count buffer_size max_in_cpu", MEANINGLESS, _THREADS),
    Key(
        "zero_optimization.offload_optimizer.ratio",
        HONOURED,
        "at stage 3: the share of chunks that the host holds; the lowest of every rank and tied modules stay",
        takes=SHARE,
    ),
    Key("zero_optimization.offload_optimizer.super_offload", REFUSED, "updates wait for the norm; remove it", (False,)),
    Key("zero_optimization.offload_optimizer.cpuadam_cores_perc", MEANINGLESS, "only with super_offload"),
    Key("zero_optimization.cpu_offload", REFUSED, "DeepSpeed renamed it offload_optimizer; remove it", (False,)),
    Key("zero_optimization.cpu_offload_param", REFUSED, "DeepSpeed renamed it offload_param; remove it", (False,)),
    Key("zero_optimization.zenflow.*", REFUSED, "it postpones part of the update; remove it"),
    Key(
        "zero_optimization.zero_hpz_partition_size",
        HONOURED,
        "at stage 3, the ranks of a node that keep all parameters together; a divisor of the data-parallel ranks",
        takes=INDEX,
    ),
    Key(
        "zero_optimization.mics_shard_size",
        HONOURED,
        "at stage 3, the ranks of a node that keep all states together, without MiCS_Init, which DeepSpeed has removed",
        takes=GROUP,
    ),
    Key("zero_optimization.mics_hierarchical_params_gather", MEANINGLESS, "groups stay inside a node", takes=SWITCH),
    *_keys(
        "zero_optimization",
        "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients",
        HONOURED,
        "weights travel in 8 bits at stage 3, gradients in 8 or 4 from stage 1 on; stored weights stay as they are",
        takes=SWITCH,
    ),
    Key("zero_optimization.zeropp_loco_param", REFUSED, _REMOVED),
    Key("aio.*", MEANINGLESS, "threads of ds_lgamp read and write the disk"),
)

_STORED_INPUTS = "ds_lgamp.offload_activations 'cpu' keeps inputs on the host; remove it and set that"
_PARALLELISM = (
    *_keys("pipeline", "stages partition seed_layers", MEANINGLESS, _STOCK_IGNORES),
    Key("pipeline.activation_checkpoint_interval", MEANINGLESS, "ds_lgamp.recompute decides", takes=INDEX),
    Key("pipeline.use_reentrant", MEANINGLESS, "ds_lgamp.recompute decides", takes=SWITCH),
    *_keys("pipeline", "pipe_partitioned grad_partitioned", MEANINGLESS, "only with tensor parallelism", takes=SWITCH),
    Key("activation_checkpointing.cpu_checkpointing", REFUSED, _STORED_INPUTS, (False,)),
    *_keys(
        "activation_checkpointing",
        "partition_activations number_checkpoints contiguous_memory_optimization synchronize_checkpoint_boundary "
        "profile",
        MEANINGLESS,
        "ds_lgamp.recompute decides, but for layers that call deepspeed.checkpointing themselves",
    ),
    *_switched("tensor_parallel.autotp_size", "AutoTP does not cut pipelines; remove it", (0, 1)),
    Key("expert_parallel.enabled", HONOURED, "DeepSpeed's AutoEP, for scripts that call engine(batch)", takes=SWITCH),
    Key("expert_parallel.autoep_size", HONOURED, "divides the data-parallel ranks of a pipeline stage", takes=COUNT),
    *_keys(
        "expert_parallel",
        "preset_model moe_layer_pattern router_pattern expert_pattern expert_w1 expert_w2 expert_w3 num_experts_attr "
        "top_k_attr has_shared_experts shared_experts_pattern shared_experts_gate_pattern expert_activation",
        HONOURED,
        "where DeepSpeed finds experts",
    ),
    *_keys(
        "expert_parallel",
        "use_grouped_mm disable_triton_grouped_mm gate_up_impl combine_impl row_weighting_impl score_apply score_func "
        "top_k route_norm route_scale routed_scaling_factor num_expert_groups num_limited_groups",
        HONOURED,
        "how DeepSpeed's layers choose experts and compute",
    ),
    Key("expert_parallel.expert_tensor_parallel_size", REFUSED, "DeepSpeed has not built it yet; remove it", (1,)),
    Key("expert_parallel.load_balance_coeff", REFUSED, "DeepSpeed refuses it, too; remove it"),
    Key("expert_parallel.comm_backend", REFUSED, "nobody has tried DeepEP beside it; remove it", ("comm",)),
    Key("expert_parallel.async_split_plan", REFUSED, "nobody has tried it on a GPU; remove it", (False,)),
    *_keys("expert_parallel", "comm_num_sm comm_qp_margin comm_max_tokens_per_rank", MEANINGLESS, "only with DeepEP"),
    Key("expert_parallel.validate_folding_routing", MEANINGLESS, "only with AutoTP"),
    Key("use_data_before_expert_parallelism", HONOURED, "for experts of deepspeed.moe and AutoEP"),
    Key("sequence_parallel_size", HONOURED, "with the mpu of DeepSpeed's Ulysses", takes=COUNT),
    Key("seq_parallel_communication_data_type", MEANINGLESS, "only with sequence parallelism"),
    Key("data_parallel_size", MEANINGLESS, "the module's topology decides"),
    Key("compile.autoep_non_moe", REFUSED, "ds_lgamp.compile compiles what is around experts; remove it", (False,)),
    *_switched("compile.deepcompile", "it replaces ZeRO inside the compiled graph; remove it, or set ds_lgamp.compile"),
    *_switched("hybrid_engine.enabled", "it is another engine; remove it"),
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
    Key("checkpoint.load_universal", REFUSED, "checkpoints load at any layout without it; remove it", (False,)),
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
