"""Two tables of Megatron's flags: how each is treated beside a ``ds_lgamp`` block, and what is refused beside ZeRO
stages 2 and 3. The first has every flag that decides how gradients are reduced and scaled, and how parameters are
updated."""

from argparse import Namespace
from enum import Enum
from typing import Any, NamedTuple

from ds_lgamp.config import BLOCK, ConfigError


class Treatment(str, Enum):
    """How a flag is treated beside a ``ds_lgamp`` block."""

    HONOURED = "honoured"
    """With the flag, losses and gradients equal those of Megatron-core's own schedules (``loop/test_flags.py``)."""
    OUTSIDE = "outside"
    """The flag acts before or after a batch, where ds_lgamp does nothing."""
    UNREAD = "unread"
    """Megatron reads the flag only beside a flag that is refused."""
    REFUSED = "refused"
    """The flag cannot work, or nobody has shown that it works."""


class Flag(NamedTuple):
    """One row of the table.

    Args:
        name: the name in Megatron-core's configurations and in Megatron-LM's arguments; "" if only the arguments have
            it.
        treatment: one of :class:`Treatment`.
        argument: the name in Megatron-LM's arguments, if it is another.
        option: the spelling on a command line, if it does not follow from the name.
        note: why a flag is refused, and the fix.
        harmless: the values at which a refused flag changes nothing.
    """

    name: str
    treatment: Treatment
    argument: str = ""
    option: str = ""
    note: str = ""
    harmless: tuple[Any, ...] = (None, False)


HONOURED, OUTSIDE, UNREAD, REFUSED = Treatment.HONOURED, Treatment.OUTSIDE, Treatment.UNREAD, Treatment.REFUSED


def _flags(names: str, treatment: Treatment, note: str = "", harmless: tuple[Any, ...] = (None, False)) -> list[Flag]:
    """Rows that differ only in their names. ``names`` holds the names, separated by spaces."""
    return [Flag(name, treatment, note=note, harmless=harmless) for name in names.split()]


_FSDP = (
    f"its hooks gather and reduce in every pass; remove it, and set zero_optimization.stage 3 beside the {BLOCK} block"
)
_SCHEDULES = f"it needs Megatron-core's own schedules; remove it, or the {BLOCK} block"
_ENGINE = f"it needs Transformer Engine, with which a {BLOCK} block has not been tried; remove it"
_NETWORK = f"it needs a network on which a {BLOCK} block has not been tried; remove it"
LAYOUT = "pipeline_model_parallel_layout"
CHUNK_FLAGS = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
"""Arguments that cut the layers of a pipeline rank into chunks."""
RANK_FLAGS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Arguments that divide the layers unevenly among the pipeline ranks."""

_DATA_PARALLELISM = (
    *_flags("overlap_grad_reduce overlap_param_gather align_param_gather align_grad_reduce", HONOURED),
    *_flags("use_distributed_optimizer num_distributed_optimizer_instances check_for_large_grads", HONOURED),
    Flag("grad_reduce_in_fp32", HONOURED, "accumulate_allreduce_grads_in_fp32"),
    Flag("grad_reduce_in_fp32", HONOURED, "grad_reduce_in_bf16"),
    Flag("check_for_nan_in_grad", HONOURED, "check_for_nan_in_loss_and_grad"),
    Flag("bucket_size", HONOURED, "ddp_bucket_size"),
    Flag("bucket_size", HONOURED, "ddp_num_buckets"),
    Flag("pad_buckets_for_high_nccl_busbw", HONOURED, "ddp_pad_buckets_for_high_nccl_busbw"),
    Flag("reduce_scatter_with_fp32_accumulation", HONOURED, "ddp_reduce_scatter_with_fp32_accumulation"),
    Flag("average_in_collective", HONOURED, "ddp_average_in_collective"),
    *_flags("fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag delay_wgrad_compute", REFUSED, _ENGINE),
    *_flags("use_megatron_fsdp use_custom_fsdp use_torch_fsdp2", REFUSED, _FSDP),
    *_flags("data_parallel_sharding_strategy outer_dp_sharding_strategy fsdp_double_buffer", UNREAD),
    *_flags("gradient_reduce_div_fusion suggested_communication_unit_size preserve_fp32_weights", UNREAD),
    *_flags("keep_fp8_transpose_cache fsdp_manual_registration torch_fsdp2_reshard_after_forward", UNREAD),
    *_flags("enable_full_sharding_in_hsdp disable_symmetric_registration sharp_enabled_group", UNREAD),
    Flag("nccl_ub", REFUSED, option="--use-nccl-ub", note=_NETWORK),
    *_flags("use_sharp nccl_communicator_config_path create_all_gather_group", REFUSED, _NETWORK),
    *_flags("high_priority_stream_groups", REFUSED, _NETWORK, (None, [])),
    *_flags("fake_process_group", REFUSED, "ranks that do not communicate would wait for each other; remove it"),
    *_flags("lazy_mpu_init", REFUSED, "process groups must be there when batches run; remove it"),
)

_PARALLELISM = (
    Flag("order", HONOURED, "use_tp_pp_dp_mapping"),
    *_flags("context_parallel_size expert_model_parallel_size sequence_parallel", HONOURED),
    Flag("cp_comm_type", OUTSIDE),
    *_flags("hierarchical_context_parallel_sizes", REFUSED, _ENGINE),
    *_flags("distributed_backend distributed_timeout_minutes distributed_timeout_seconds_after_init", OUTSIDE),
    *_flags("local_rank model_parallel_size scatter_gather_tensors_in_pipeline", OUTSIDE),
    *_flags(LAYOUT, HONOURED),
    *_flags("overlap_p2p_comm", OUTSIDE),
    *_flags("inprocess_restart", REFUSED, "a rank that dies ends the others, for a launcher to start all; remove it"),
    *(Flag("virtual_pipeline_model_parallel_size", HONOURED, argument) for argument in CHUNK_FLAGS),
    Flag("num_layers_in_first_pipeline_stage", HONOURED, "decoder_first_pipeline_num_layers"),
    Flag("num_layers_in_last_pipeline_stage", HONOURED, "decoder_last_pipeline_num_layers"),
    *_flags("account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split", HONOURED),
    Flag(
        "",
        REFUSED,
        "microbatch_group_size_per_vp_stage",
        "--microbatch-group-size-per-virtual-pipeline-stage",
        f"the {BLOCK} block groups micro-batches; remove it and set {BLOCK}.micro_batch_group",
    ),
)

_OPTIMIZER = (
    *_flags("lr min_lr decoupled_lr decoupled_min_lr weight_decay apply_wd_to_qk_layernorm clip_grad", HONOURED),
    *_flags("adam_beta1 adam_beta2 adam_eps sgd_momentum decoupled_weight_decay log_num_zeros_in_grad", HONOURED),
    *_flags("fp16 bf16 params_dtype loss_scale initial_loss_scale min_loss_scale", HONOURED),
    *_flags("loss_scale_window hysteresis overlap_param_gather_with_optimizer_step", HONOURED),
    *_flags("gradient_accumulation_fusion calculate_per_token_loss defer_embedding_wgrad_compute", HONOURED),
    *_flags("optimizer", REFUSED, "no other has been tried; use adam or sgd", ("adam", "sgd")),
    *_flags("muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec", UNREAD),
    *_flags("muon_num_ns_steps muon_tp_mode muon_extra_scale_factor", UNREAD),
    *_flags("use_precision_aware_optimizer", REFUSED, _ENGINE),
    *_flags("store_param_remainders main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype", UNREAD),
    *_flags("optimizer_cpu_offload", REFUSED, "optimizer states stay on the device; remove it"),
    *_flags("optimizer_offload_fraction use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d", UNREAD),
    *_flags("pin_cpu_grads pin_cpu_params fp8_recipe", UNREAD),
    Flag("wgrad_deferral_limit", OUTSIDE),
    *_flags("barrier_with_L1_time timers config_logger_dir no_weight_decay_cond_type", OUTSIDE),
    *_flags("lr_decay_style lr_wsd_decay_style lr_decay_iters lr_decay_samples lr_wsd_decay_iters", OUTSIDE),
    *_flags("lr_wsd_decay_samples lr_warmup_fraction lr_warmup_iters lr_warmup_samples lr_warmup_init warmup", OUTSIDE),
    *_flags("override_opt_param_scheduler use_checkpoint_opt_param_scheduler", OUTSIDE),
    *_flags("start_weight_decay end_weight_decay weight_decay_incr_style", OUTSIDE),
)

_MODEL = (
    *_flags("attention_softmax_in_fp32 fp16_lm_cross_entropy enable_experimental spec", OUTSIDE),
    Flag("fp8", REFUSED, option="--fp8-format", note=_ENGINE),
    Flag("fp4", REFUSED, option="--fp4-format", note=_ENGINE),
    Flag("fp4_param", REFUSED, option="--fp4-param-gather", note=_ENGINE),
    *_flags("te_precision_config_file", REFUSED, _ENGINE),
    *_flags("hybrid_attention_ratio hybrid_mlp_ratio hybrid_override_pattern", OUTSIDE),
    *_flags("use_legacy_models", REFUSED, "legacy models have no chunks; remove it"),
    *_flags("yaml_cfg", REFUSED, "the block cannot set arguments beside it; use flags"),
    *_flags("overlap_moe_expert_parallel_comm hybrid_context_parallel", REFUSED, _SCHEDULES),
    # Megatron-LM sets the first from the second.
    Flag("cpu_offloading", REFUSED, "cpu_offloading_num_layers", note=_SCHEDULES),
    *_flags("fine_grained_activation_offloading", REFUSED, _SCHEDULES),
    *_flags("num_microbatches_with_partial_activation_checkpoints", REFUSED, _SCHEDULES),
    *_flags("cuda_graph_impl", REFUSED, _SCHEDULES, ("none", None)),
    # The old spellings, which Megatron-LM's validation turns into the new one.
    *_flags("enable_cuda_graph external_cuda_graph", REFUSED, _SCHEDULES),
)

TOGETHER = {
    ("defer_embedding_wgrad_compute", "overlap_grad_reduce"): "the output layer's gradient would come after it was "
    "reduced; remove one of them",
}
"""Pairs of honoured flags that are refused together, and why."""

FLAGS: tuple[Flag, ...] = (*_DATA_PARALLELISM, *_PARALLELISM, *_OPTIMIZER, *_MODEL)


def refuse_flags(settings: Any, arguments: bool = False) -> None:
    """Raises ConfigError for a refused flag that has an effect.

    Args:
        settings: one of Megatron-core's configurations, or Megatron-LM's arguments.
        arguments: whether ``settings`` are Megatron-LM's arguments.
    """
    for flag in FLAGS:
        if flag.treatment is not REFUSED:
            continue
        name = flag.argument or flag.name if arguments else flag.name
        value = getattr(settings, name, flag.harmless[0])
        if value not in flag.harmless:
            shown = flag.option or option_of(name) if arguments else name
            raise ConfigError(f"{shown} is {value!r}: {flag.note}")


def refuse_together(*settings: Any) -> None:
    """Raises ConfigError for two flags that are honoured alone but not together.

    Args:
        settings: the configurations of one model, or Megatron-LM's arguments. If several have a flag, the last decides.
    """
    given = {name: value for part in settings for name, value in vars(part).items()}
    for names, note in TOGETHER.items():
        if all(given.get(name) for name in names):
            raise ConfigError(f"{names[0]} and {names[1]} are True: {note}")


def option_of(argument: str) -> str:
    """The spelling of one of Megatron-LM's arguments on a command line."""
    return "--" + argument.replace("_", "-")


IMPLIED = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
"""Flags that ask for what the program does anyway. They may be given or not."""

NO_EXPERTS = "experts are in data-parallel groups of their own, which stages 2 and 3 have not; remove it"
_READS_WHOLE = "it reads whole weights or gradients, which no rank has; remove it"
_NEEDS_BUFFERS = "it needs Megatron-core's buffers of gradients, which stages 2 and 3 have not; remove it"

REFUSED_BESIDE_SHARDING: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_experts": ((None,), NO_EXPERTS),
    "num_distributed_optimizer_instances": ((1,), "all data-parallel ranks share a chunk's shards; remove it"),
    "gradient_accumulation_fusion": (
        (False,),
        "its kernel adds to Megatron-core's buffers; give --no-gradient-accumulation-fusion",
    ),
    "defer_embedding_wgrad_compute": (
        (False,),
        "the gradient would come after it was reduced; remove it",
    ),
    "ddp_reduce_scatter_with_fp32_accumulation": ((False,), _NEEDS_BUFFERS),
    "check_for_large_grads": ((False,), _NEEDS_BUFFERS),
    "overlap_param_gather_with_optimizer_step": ((False,), _NEEDS_BUFFERS),
    "init_model_with_meta_device": ((False,), "it has not been tried with stages 2 and 3; remove it"),
    "save_wgrads_interval": ((None,), _READS_WHOLE),
    "check_weight_hash_across_dp_replicas_interval": ((None,), _READS_WHOLE),
    "qk_clip": ((False,), _READS_WHOLE),
    "skip_train": ((False,), "nothing is trained, so that nothing would be sharded; set stage 0"),
    "vision_pretraining": ((False,), _READS_WHOLE),
    "perform_rl_step": ((False,), _READS_WHOLE),
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
    for name, (harmless, note) in REFUSED_BESIDE_SHARDING.items():
        value = getattr(settings, name, harmless[0])
        if value not in harmless:
            shown = option_of(name) if arguments else name
            raise ConfigError(f"{shown} is {value!r} beside zero_optimization.stage 2 or 3: {note}")
