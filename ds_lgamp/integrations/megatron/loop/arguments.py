"""Adds the block to Megatron-LM's arguments, and compares the arguments with the rest of the configuration file."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.megatron.loop.batch import placement_of, refuse_settings
from ds_lgamp.integrations.megatron.loop.budget import refuse_budget
from ds_lgamp.integrations.megatron.loop.cuts import Cut, cut
from ds_lgamp.integrations.megatron.loop.flags import (
    option_of,
    prepare_sharding,
    refuse_beside_sharding,
    refuse_flags,
    refuse_together,
)
from ds_lgamp.integrations.program_spec import program_spec, refuse_split, shard_groups
from ds_lgamp.partition.agreement import Term, process_terms, refuse_differing_terms

SHARED_KEYS = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_clipping": "clip_grad",
}
"""Keys of the configuration file, each with the argument of Megatron-LM that must have the same value."""
ACCUMULATION = "gradient_accumulation_steps"
_STEPS = "step_batch_size_schedule"
"""The argument with the sizes of batches that grow, of releases from 0.18 on. ``global_batch_size`` means nothing
then."""
PRECISIONS = ("bf16", "fp16")
MEANINGLESS = ("resident_chunks", "defer_gathers", "asynchronous_save", "keep_last")
"""Keys of the block that have no effect, because Megatron-LM has its own way. ``resident_chunks`` has one at stages 2
and 3."""
_WITH_DEEPSPEED = "remove it, or train with DeepSpeed's engine"
_ON_THE_DEVICE = f"but in Megatron-LM's training loop everything stays on the device; {_WITH_DEEPSPEED}"
REFUSED_KEYS = {
    "reproducible": (False, "which needs DeepSpeed's engine; set --deterministic-mode"),
    "overlap_update": (False, "but Megatron-LM's own optimizer updates all at once; remove it"),
    "nonfinite": (
        None,
        "but Megatron-LM has a check of its own, unless --no-check-for-nan-in-loss-and-grad is given; remove it",
    ),
    "keep_frozen": ("auto", f"but in Megatron-LM's training loop frozen weights lie as others do; {_WITH_DEEPSPEED}"),
    "regather": ("network", _ON_THE_DEVICE),
    "activation_dtype": (
        None,
        f"but in Megatron-LM's training loop hidden states travel in the model's pipeline_dtype; {_WITH_DEEPSPEED}",
    ),
    "stochastic_rounding": (False, f"but Megatron-LM's own optimizer keeps its weights as it does; {_WITH_DEEPSPEED}"),
    "split_backward": (
        False,
        f"but in Megatron-LM's training loop each gradient reports to the reduction of all as one; {_WITH_DEEPSPEED}",
    ),
    "overlap_exchanges": (
        False,
        "but Megatron-core's layers note losses of one micro-batch at a time; remove it, or train with DeepSpeed's "
        "engine and expert_parallel",
    ),
    "compile": (
        False,
        "but in Megatron-LM's training loop layers have fused kernels of their own, for which its flags ask; "
        + _WITH_DEEPSPEED,
    ),
    "offload_activations": ("none", _ON_THE_DEVICE),
    "live_checkpoint": (
        None,
        "but Megatron-LM has checkpoints of its own; remove it, and set --save and --save-interval",
    ),
    "data_rank_speeds": (
        None,
        "but Megatron-LM's training loop gives every data-parallel rank as many micro-batches; " + _WITH_DEEPSPEED,
    ),
    "outputs": ("loss", "but Megatron-LM's forward_step gives the loss of a micro-batch; remove it"),
}
"""Keys of the block that Megatron-LM's loop cannot honour, each with the value at which it changes nothing, and the
reason with the fix."""
_OFFLOADED = ("offload_optimizer", "offload_param")
_OF_ONE_RANK = ("rank", "local_rank", "tensorboard", "wandb")
"""Prefixes of arguments that may differ, because only one rank heeds them."""
_OF_THE_ENDS = {
    "reset_attention_mask": "the masks",
    "sft": "the boundaries of its documents",
    "full_validation": "the length of its data",
}
"""Arguments that need data of Megatron-LM which it leaves out between the first and the last chunk."""
_SAME = "give every rank the same command line and configuration"
_UNBOUNDED = 2**62
"""A bucket size that no chunk exceeds."""


class Job(NamedTuple):
    """The job that a configuration file asks for."""

    settings: LgampConfig
    zero_stage: int
    others: dict[str, Any]
    """Every key of the file."""


def check_file(config: dict[str, Any], settings: LgampConfig) -> Job:
    """Returns the job that a configuration file describes. Raises ConfigError for what Megatron-LM's training loop
    cannot honour."""
    stage = (config.get("zero_optimization") or {}).get("stage") or 0
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"zero_optimization.stage is {stage!r}; set 0, 1, 2 or 3")
    for key, (harmless, reason) in REFUSED_KEYS.items():
        if (value := getattr(settings, key)) != harmless:
            raise ConfigError(f"{BLOCK}.{key} is {value!r}, {reason}")
    for name, ranks in shard_groups(config).items():
        raise ConfigError(
            f"zero_optimization.{name} is {ranks!r}, but in Megatron-LM's training loop all data-parallel ranks share "
            f"a chunk's shards; {_WITH_DEEPSPEED}"
        )
    for name in _OFFLOADED:
        device = ((config.get("zero_optimization") or {}).get(name) or {}).get("device") or "none"
        if device != "none":
            raise ConfigError(f"zero_optimization.{name}.device is '{device}', {_ON_THE_DEVICE}")
    refuse_split(settings, "Megatron-core")
    if settings.schedule == "zbv":
        raise ConfigError(f"{BLOCK}.schedule is 'zbv', but Megatron-core's chunks are modular; use 'layered'")
    if settings.placement == "contiguous" and not settings.one_chunk_per_rank:
        raise ConfigError(f"{BLOCK}.placement is 'contiguous', but Megatron-core's chunks are modular; remove it")
    return Job(settings, stage, config)


def refuse_differing_ranks(args: Namespace, job: Job) -> None:
    """Raises ConfigError if two ranks differ in the configuration file, in Megatron-LM's arguments, the versions of
    packages or the environment. Collective over all ranks."""
    own = {f"{key} of the configuration file": Term(repr(value), _SAME) for key, value in job.others.items()}
    for name, value in vars(args).items():
        # Objects show their address, which differs.
        if not name.startswith(_OF_ONE_RANK) and " at 0x" not in repr(value):
            own[f"the argument {option_of(name)}"] = Term(repr(value), _SAME)
    refuse_differing_terms({**own, **process_terms()}, ConfigError)


def validate_with_block(args: Namespace, job: Job, validate: Callable[[], Any]) -> list[str]:
    """Adds the block to the arguments, lets Megatron-LM validate them, and returns the keys of the file that have no
    effect.

    Args:
        args: Megatron-LM's arguments; changed in place.
        validate: Megatron-LM's own validation of ``args``.

    Raises ConfigError if the flags and the file disagree.
    """
    refuse_flags(args, arguments=True)
    refuse_together(args)
    if job.zero_stage > 1:
        prepare_sharding(args)
    else:
        _refuse_another_stage(args, job)
    if args.mtp_num_layers and args.pipeline_model_parallel_layout is None:
        raise ConfigError("--mtp-num-layers is given; place these layers with --pipeline-model-parallel-layout")
    _set_recomputation(args, job.settings)
    ranks = args.pipeline_model_parallel_size
    cut_as = cut(args, job.settings)
    chunks = cut_as.chunks
    refuse_settings(args, chunks_on_one_rank=chunks > ranks == 1)
    if chunks > ranks and getattr(args, "multiple_validation_sets", False):
        raise ConfigError(
            "--multiple-validation-sets is True: every chunk would take another of the sets; remove it, or set "
            f"{BLOCK}.chunks_per_rank to 1"
        )
    if chunks > max(ranks, 2):
        _refuse_data_of_the_middle(args)
    if chunks > ranks == 1:
        _validate_one_rank(args, cut_as, validate)
    else:
        # Megatron-core requires this for its own interleaved schedule. The links of ds_lgamp never wait for each other.
        args.overlap_p2p_comm = True
        setattr(args, cut_as.argument, cut_as.value)
        validate()
    if job.zero_stage > 1:
        refuse_beside_sharding(args, arguments=True)
    _refuse_disagreement(args, job)
    _check_batches(args, job)
    if chunks > ranks and args.ddp_bucket_size is None and args.ddp_num_buckets is None:
        # Without bounds, a chunk is one bucket, which is gathered and reduced as a whole.
        args.ddp_bucket_size = _UNBOUNDED
    return _unread_keys(job)


def _refuse_data_of_the_middle(args: Namespace) -> None:
    """Raises ConfigError if the chunks between the first and the last need what Megatron-LM's ``get_batch`` and its
    data loaders leave out there, however few pipeline ranks there are."""
    for name, missing in _OF_THE_ENDS.items():
        if getattr(args, name, False):
            raise ConfigError(
                f"{option_of(name)} is given, but Megatron-LM gives {missing} to the first and the last chunk only; "
                f"remove it, or set {BLOCK}.chunks_per_rank to 1 with at most 2 pipeline ranks"
            )


def _refuse_another_stage(args: Namespace, job: Job) -> None:
    if bool(args.use_distributed_optimizer) != (job.zero_stage == 1):
        given = "given" if args.use_distributed_optimizer else "not given"
        raise ConfigError(
            f"zero_optimization.stage is {job.zero_stage}, but --use-distributed-optimizer is {given}; they mean the "
            "same, change one of them"
        )


def _refuse_disagreement(args: Namespace, job: Job) -> None:
    """Raises ConfigError if a key and its flag have different values, once Megatron-LM has filled in its defaults."""
    for key in ("train_batch_size", ACCUMULATION) if getattr(args, _STEPS, None) else ():
        if job.others.get(key) not in (None, "auto"):
            raise ConfigError(f"{key} is {job.others[key]!r}, but {option_of(_STEPS)} has several sizes; remove {key}")
    for key, name in SHARED_KEYS.items():
        value, flag = job.others.get(key), getattr(args, name)
        if value not in (None, "auto") and value != flag:
            raise ConfigError(
                f"{key} is {value!r}, but {option_of(name)} is {flag!r}; make them equal, or remove {key}"
            )
    steps, micro_batches = job.others.get(ACCUMULATION), _micro_batches(args, args.global_batch_size)
    if steps not in (None, "auto", micro_batches):
        raise ConfigError(
            f"{ACCUMULATION} is {steps!r}, but --global-batch-size makes {micro_batches} micro-batches; make them "
            f"equal, or remove {ACCUMULATION}"
        )
    for precision in PRECISIONS:
        enabled = (job.others.get(precision) or {}).get("enabled")
        if enabled not in (None, "auto") and bool(enabled) != bool(getattr(args, precision)):
            raise ConfigError(
                f"{precision}.enabled is {enabled!r}, but --{precision} is {getattr(args, precision)!r}; make them "
                f"equal, or remove {precision}"
            )


def _set_recomputation(args: Namespace, settings: LgampConfig) -> None:
    """Sets Megatron-core's own recomputation from the block. Raises ConfigError if the flags ask for another kind."""
    if "recompute" not in settings.model_fields_set:
        return
    refuse_budget(settings, args)
    # Layers that recompute do it by themselves; a budget then lets some be.
    asked = {"none": None, "auto": "full"}.get(settings.recompute, settings.recompute)
    given = "selective" if args.recompute_activations else args.recompute_granularity
    if given is not None and given != asked:
        raise ConfigError(
            f"{BLOCK}.recompute is '{settings.recompute}', but the flags say {given}; make them equal, or remove one"
        )
    if asked == "full" and given is None:
        args.recompute_method, args.recompute_num_layers = "uniform", 1
    args.recompute_granularity = asked


def _validate_one_rank(args: Namespace, cut_as: Cut, validate: Callable[[], Any]) -> None:
    """Hides the chunks from Megatron-LM's validation, which refuses several chunks on one pipeline rank."""
    aligned = args.align_param_gather
    setattr(args, cut_as.argument, cut_as.uncut)
    validate()
    setattr(args, cut_as.argument, cut_as.value)
    args.virtual_pipeline_model_parallel_size = cut_as.chunks
    args.align_param_gather = aligned


def _check_batches(args: Namespace, job: Job) -> None:
    """Raises ConfigError if the schedule does not take the number of micro-batches of any batch, of those that grow,
    too."""
    ranks = args.pipeline_model_parallel_size
    placement = placement_of(args.virtual_pipeline_model_parallel_size or 1, ranks)
    for batch in _batches(args):
        program_spec(job.settings, placement, _micro_batches(args, batch), job.zero_stage)


def _batches(args: Namespace) -> list[int]:
    """Returns the sizes of all batches."""
    if steps := getattr(args, _STEPS, None):
        from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

        # Only rank 0 logs.
        counts = args.micro_batch_size, args.data_parallel_size, False, 1
        return [batch for _, batch in StepBatchsizeNumMicroBatchesCalculator(*counts, steps, args.seq_length).schedule]
    # Releases that have steps ignore a ramp-up.
    if hasattr(args, _STEPS) or not args.rampup_batch_size:
        return [args.global_batch_size]
    start, increment, _samples = map(int, args.rampup_batch_size)
    return [*range(start, args.global_batch_size, increment), args.global_batch_size]


def _micro_batches(args: Namespace, batch: int) -> int:
    return batch // (args.micro_batch_size * args.data_parallel_size)


def _unread_keys(job: Job) -> list[str]:
    """Returns the keys of the file that have no effect. Keys of a section are named one by one if another key of it is
    read."""
    read = {"zero_optimization": "stage", **dict.fromkeys(PRECISIONS, "enabled")}
    unread = sorted(set(job.others) - {BLOCK, ACCUMULATION, *read, *SHARED_KEYS})
    for section, key in read.items():
        unread += [f"{section}.{name}" for name in job.others.get(section) or {} if name != key]
    meaningless = [key for key in MEANINGLESS if key != "resident_chunks" or job.zero_stage < 2]
    return unread + [f"{BLOCK}.{key}" for key in meaningless if key in job.settings.model_fields_set]
