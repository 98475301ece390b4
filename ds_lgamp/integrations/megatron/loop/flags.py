"""Flags of Megatron that are refused beside a ``ds_lgamp`` block, and those that are refused only beside ZeRO stages 2
and 3. ``known_flags.py`` of the tests lists all other flags that decide how gradients are reduced and scaled and how
parameters are updated; the tests find one that neither list has."""

from argparse import Namespace
from typing import Any, NamedTuple

from ds_lgamp.config import BLOCK, ConfigError


class Flag(NamedTuple):
    """A flag that is refused, because it cannot work or because nobody has shown that it works.

    Args:
        name: the name in Megatron-core's configurations and in Megatron-LM's arguments; "" if only the arguments have
            it.
        note: the reason, and the fix.
        harmless: the values at which the flag changes nothing.
        argument: the name in Megatron-LM's arguments, if it is another.
        option: the spelling on a command line, if it does not follow from the name.
    """

    name: str
    note: str
    harmless: tuple[Any, ...] = (None, False)
    argument: str = ""
    option: str = ""

    def refuse(self, settings: Any, arguments: bool, beside: str = "") -> None:
        """Raises ConfigError if the flag has an effect in ``settings``."""
        name = self.argument or self.name if arguments else self.name
        value = getattr(settings, name, self.harmless[0])
        if value not in self.harmless:
            shown = self.option or option_of(name) if arguments else name
            raise ConfigError(f"{shown} is {value!r}{beside}: {self.note}")


def _flags(names: str, note: str, harmless: tuple[Any, ...] = (None, False)) -> list[Flag]:
    """Flags that differ only in their ``names``, which spaces separate."""
    return [Flag(name, note, harmless) for name in names.split()]


LAYOUT = "pipeline_model_parallel_layout"
PATTERN, OLD_PATTERN = "hybrid_layer_pattern", "hybrid_override_pattern"
"""The argument that lists the layers of a HybridModel, and what it was called before release 0.17."""
CHUNK_FLAGS = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
"""Arguments that cut the layers of a pipeline rank into chunks."""
RANK_FLAGS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Arguments that divide the layers unevenly among the pipeline ranks."""

_FSDP = (
    f"its hooks gather and reduce in every pass; remove it, and set zero_optimization.stage 3 beside the {BLOCK} block"
)
_SCHEDULES = f"it needs Megatron-core's own schedules; remove it, or the {BLOCK} block"
_ENGINE = f"it needs Transformer Engine, with which a {BLOCK} block has not been tried; remove it"
_NETWORK = f"it needs a network on which a {BLOCK} block has not been tried; remove it"
_REMADE = f"ranks would share out weights beside tensor parallelism, which a {BLOCK} block does not know; remove it"

REFUSED: tuple[Flag, ...] = (
    *_flags("fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag delay_wgrad_compute", _ENGINE),
    *_flags("overlap_dispatch_backward_with_experts_wgrad moe_paged_stash moe_expert_rank_capacity_factor", _ENGINE),
    *_flags("dataloader_inter_document_masking fp4_param_gather", _ENGINE),
    Flag("gtp_weight_remat_size", _REMADE, (None, 1), "tensor_parallel_num_weight_shards"),
    Flag("expert_gtp_weight_remat_size", _REMADE, (None, 1), "expert_tensor_parallel_num_weight_shards"),
    *_flags("use_megatron_fsdp use_custom_fsdp use_torch_fsdp2", _FSDP),
    Flag("nccl_ub", _NETWORK, option="--use-nccl-ub"),
    *_flags("use_sharp nccl_communicator_config_path create_all_gather_group", _NETWORK),
    Flag("high_priority_stream_groups", _NETWORK, (None, [])),
    Flag("fake_process_group", "ranks that do not communicate would wait for each other; remove it"),
    Flag("lazy_mpu_init", "process groups must be there when batches run; remove it"),
    Flag("hierarchical_context_parallel_sizes", _ENGINE),
    Flag("inprocess_restart", "a rank that dies ends the others, for a launcher to start all; remove it"),
    Flag(
        "",
        f"the {BLOCK} block groups micro-batches; remove it and set {BLOCK}.micro_batch_group",
        argument="microbatch_group_size_per_vp_stage",
        option="--microbatch-group-size-per-virtual-pipeline-stage",
    ),
    Flag("optimizer", "no other has been tried; use adam or sgd", ("adam", "sgd")),
    Flag("use_precision_aware_optimizer", _ENGINE),
    Flag("optimizer_cuda_graph", f"an update in a graph has not been tried beside a {BLOCK} block; remove it"),
    Flag("freeze_all_layers", f"nothing would be trained, and no gradient sent; remove it, or the {BLOCK} block"),
    Flag("optimizer_cpu_offload", "optimizer states stay on the device; remove it"),
    Flag("fp8", _ENGINE, option="--fp8-format"),
    Flag("fp4", _ENGINE, option="--fp4-format"),
    Flag("fp4_param", _ENGINE, option="--fp4-param-gather"),
    Flag("te_precision_config_file", _ENGINE),
    Flag("use_legacy_models", "legacy models have no chunks; remove it"),
    Flag("yaml_cfg", "the block cannot set arguments beside it; use flags"),
    *_flags("overlap_moe_expert_parallel_comm hybrid_context_parallel", _SCHEDULES),
    # Megatron-LM sets the first from the second.
    Flag("cpu_offloading", _SCHEDULES, argument="cpu_offloading_num_layers"),
    *_flags("fine_grained_activation_offloading num_microbatches_with_partial_activation_checkpoints", _SCHEDULES),
    Flag("cuda_graph_impl", _SCHEDULES, ("none", None)),
    # The old spellings, which Megatron-LM's validation turns into the new one.
    *_flags("enable_cuda_graph external_cuda_graph", _SCHEDULES),
)

TOGETHER = {
    ("defer_embedding_wgrad_compute", "overlap_grad_reduce"): "the output layer's gradient would come after it was "
    "reduced; remove one of them",
}
"""Pairs of honoured flags that are refused together, and why."""

IMPLIED = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
"""Flags that ask for what the program does anyway at stages 2 and 3. They may be given or not."""

_WHOLE = "it reads whole weights or gradients, which no rank has; remove it"
_BUFFERS = "it needs Megatron-core's buffers of gradients, which stages 2 and 3 have not; remove it"
_UNTRIED = "it has not been tried with stages 2 and 3; remove it"

REFUSED_BESIDE_SHARDING: tuple[Flag, ...] = (
    Flag("num_distributed_optimizer_instances", "all data-parallel ranks share a chunk's shards; remove it", (1,)),
    Flag(
        "gradient_accumulation_fusion",
        "its kernel adds to Megatron-core's buffers; give --no-gradient-accumulation-fusion",
        (False,),
    ),
    Flag("defer_embedding_wgrad_compute", "the gradient would come after it was reduced; remove it", (False,)),
    *_flags("ddp_reduce_scatter_with_fp32_accumulation check_for_large_grads", _BUFFERS, (False,)),
    Flag("overlap_param_gather_with_optimizer_step", _BUFFERS, (False,)),
    Flag("init_model_with_meta_device", _UNTRIED, (False,)),
    Flag(
        "param_name_patterns_for_fp32_local_accumulation",
        _BUFFERS,
        ((), [], None),
        "ddp_param_name_patterns_for_fp32_local_accumulation",
    ),
    *_flags("save_wgrads_interval save_params_interval", _WHOLE, (None,)),
    Flag("check_weight_hash_across_dp_replicas_interval", _WHOLE, (None,)),
    Flag("mtp_detach_heads", "the gradients of these layers would need a norm of their own; remove it", (False,)),
    Flag("qk_clip", _WHOLE, (False,)),
    Flag("skip_train", "nothing is trained, so that nothing would be sharded; set stage 0", (False,)),
    *_flags("vision_pretraining perform_rl_step", _WHOLE, (False,)),
    Flag("moe_use_upcycling", "no rank has whole weights to fill; remove it, and convert without a block", (False,)),
    Flag("async_save", "weights are complete only until the save returns; remove it"),
    Flag("ckpt_format", "it has not been tried with stages 2 and 3; use torch_dist", ("torch_dist",)),
    Flag("dump_param_to_param_group_map", "it is written for whole parameters, which no rank has; remove it", (None,)),
    Flag("load_main_params_from_ckpt", "weights are taken as they are in the model; remove it", (False,)),
    Flag("non_persistent_ckpt_type", _UNTRIED, (None, "global")),
)


def refuse_flags(settings: Any, arguments: bool = False) -> None:
    """Raises ConfigError for a refused flag that has an effect.

    Args:
        settings: one of Megatron-core's configurations, or Megatron-LM's arguments.
        arguments: whether ``settings`` are Megatron-LM's arguments.
    """
    for flag in REFUSED:
        flag.refuse(settings, arguments)


def refuse_together(*settings: Any) -> None:
    """Raises ConfigError for two flags that are honoured alone but not together.

    Args:
        settings: the configurations of one model, or Megatron-LM's arguments. If several have a flag, the last decides.
    """
    given = {name: value for part in settings for name, value in vars(part).items()}
    for names, note in TOGETHER.items():
        if all(given.get(name) for name in names):
            raise ConfigError(f"{names[0]} and {names[1]} are True: {note}")


def prepare_sharding(args: Namespace) -> None:
    """Takes back the flags that :data:`IMPLIED` names, before Megatron-LM validates the arguments."""
    for name in IMPLIED:
        setattr(args, name, False)


def refuse_beside_sharding(settings: Any, arguments: bool = False) -> None:
    """Raises ConfigError for a flag that stages 2 and 3 cannot honour. Megatron-LM's arguments have its defaults."""
    for flag in REFUSED_BESIDE_SHARDING:
        flag.refuse(settings, arguments, " beside zero_optimization.stage 2 or 3")


def option_of(argument: str) -> str:
    """Returns the spelling of one of Megatron-LM's arguments on a command line."""
    return "--" + argument.replace("_", "-")
