"""Adds the block to Megatron-LM's arguments, and compares the arguments with the rest of the configuration file."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig, bounds_by_weight, program_spec
from ds_lgamp.integrations.megatron.loop.batch import placement_of
from ds_lgamp.integrations.megatron.loop.flags import option_of, refuse_flags, refuse_together
from ds_lgamp.integrations.megatron.loop.refusals import refuse_settings
from ds_lgamp.schedule.orders import SINGLE_CHUNK_SCHEDULES
from ds_lgamp.schedule.placement import split_by_count

SHARED_KEYS = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_clipping": "clip_grad",
}
"""Keys of the configuration file, each with the argument of Megatron-LM that must have the same value."""
ACCUMULATION = "gradient_accumulation_steps"
PRECISIONS = ("bf16", "fp16")
MEANINGLESS = ("resident_chunks", "defer_gathers", "asynchronous_save", "keep_last")
"""Keys of the block that have no effect, because Megatron-LM has its own way."""
_UNBOUNDED = 2**62
"""A bucket size that no chunk exceeds."""


class Job(NamedTuple):
    """The job that a configuration file asks for."""

    settings: LgampConfig
    zero_stage: int
    others: dict[str, Any]
    """Every key of the file."""


def check_file(config: dict[str, Any], settings: LgampConfig) -> Job:
    """The job that a configuration file describes. Raises ConfigError for what Megatron-LM's training loop cannot
    honour."""
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    if stage not in (0, 1):
        raise ConfigError(
            f"zero_optimization.stage is {stage!r}, but inside Megatron-LM's training loop it is 0, or 1 with the "
            "distributed optimizer; set one of them, or train with DeepSpeed's engine, as launch/pretrain_gpt.py does"
        )
    if settings.reproducible:
        raise ConfigError(f"{BLOCK}.reproducible is True, which needs DeepSpeed's engine; set --deterministic-mode")
    if settings.placement == "contiguous" and not settings.one_chunk_per_rank:
        raise ConfigError(f"{BLOCK}.placement is 'contiguous', but Megatron-core's chunks are modular; remove it")
    return Job(settings, stage, config)


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
    if args.mtp_num_layers and args.pipeline_model_parallel_layout is None:
        raise ConfigError("--mtp-num-layers is given; place these layers with --pipeline-model-parallel-layout")
    _refuse_another_stage(args, job)
    _set_recomputation(args, job.settings)
    ranks = args.pipeline_model_parallel_size
    chunks, layout = _cut(args, job.settings)
    refuse_settings(args, chunks_on_one_rank=chunks > ranks == 1)
    if chunks > ranks and getattr(args, "multiple_validation_sets", False):
        raise ConfigError(
            "--multiple-validation-sets is True: every chunk would take another of the sets; remove it, or set "
            f"{BLOCK}.chunks_per_rank to 1"
        )
    if ranks == 1 and layout is not None and chunks > 1:
        _validate_one_rank(args, layout, chunks, validate)
    else:
        # Megatron-core requires this for its own interleaved schedule. The links of ds_lgamp never wait for each other.
        args.overlap_p2p_comm = True
        args.pipeline_model_parallel_layout = layout
        validate()
    _refuse_disagreement(args, job)
    _check_batches(args, job)
    if chunks > ranks and args.ddp_bucket_size is None and args.ddp_num_buckets is None:
        # Without bounds, a chunk is one bucket, which is gathered and reduced as a whole.
        args.ddp_bucket_size = _UNBOUNDED
    return _unread_keys(job)


def _cut(args: Namespace, settings: LgampConfig) -> tuple[int, str | None]:
    """The number of chunks, and their layout; None as the layout if Megatron-LM cuts the layers alike without one."""
    layout, ranks = args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size
    if layout is not None:
        _refuse_two_cuts(args, settings)
        return PipelineParallelLayerLayout.get_num_stages_from_str(layout), layout
    layers = args.num_layers or args.decoder_num_layers
    sizes = chunk_sizes(settings, layers, ranks)
    return len(sizes), layout_of(sizes) if len(sizes) > ranks or layers % ranks else None


def chunk_sizes(settings: LgampConfig, layers: int, pipeline_ranks: int) -> list[int]:
    """The number of transformer layers of every chunk, larger ones first. Every pipeline rank gets as many chunks.

    Raises ConfigError if a chunk would have no layer, or if ranks would have different numbers of chunks.
    """
    if settings.layers_per_chunk is not None:
        bounds = split_by_count(layers, settings.layers_per_chunk)
        chunks = len(bounds) - 1
        if chunks % pipeline_ranks:
            raise ConfigError(
                f"{BLOCK}.layers_per_chunk is {settings.layers_per_chunk}: {layers} layers make {chunks} chunks, but "
                f"Megatron-core needs a multiple of {pipeline_ranks} pipeline ranks; set {BLOCK}.chunks_per_rank, or "
                "cut them unevenly with --pipeline-model-parallel-layout"
            )
    else:
        if layers < pipeline_ranks:
            raise ConfigError(
                f"--pipeline-model-parallel-size is {pipeline_ranks}, but the model has {layers} layers; use at most "
                f"{layers}"
            )
        per_rank = settings.chunks_per_rank
        if per_rank is None:
            per_rank = 1 if settings.schedule in SINGLE_CHUNK_SCHEDULES else layers // pipeline_ranks
        bounds = bounds_by_weight(per_rank, pipeline_ranks, [1.0] * layers)
    return [end - start for start, end in zip(bounds, bounds[1:])]


def layout_of(sizes: list[int]) -> str:
    """Chunks in Megatron-core's text form. ``Ett|tt|tL`` stands for three chunks: the first has the embedding, the last
    has the loss."""
    return "E" + "|".join("t" * size for size in sizes) + "L"


def _refuse_two_cuts(args: Namespace, settings: LgampConfig) -> None:
    for key in ("chunks_per_rank", "layers_per_chunk"):
        if getattr(settings, key) is not None:
            raise ConfigError(
                f"--pipeline-model-parallel-layout and {BLOCK}.{key} both cut the layers; keep one of them"
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
    asked = None if settings.recompute == "none" else settings.recompute
    given = "selective" if args.recompute_activations else args.recompute_granularity
    if given is not None and given != asked:
        raise ConfigError(
            f"{BLOCK}.recompute is '{settings.recompute}', but the flags say {given}; make them equal, or remove one"
        )
    if asked == "full" and given is None:
        args.recompute_method, args.recompute_num_layers = "uniform", 1
    args.recompute_granularity = asked


def _validate_one_rank(args: Namespace, layout: str, chunks: int, validate: Callable[[], Any]) -> None:
    """Hides the chunks from Megatron-LM's validation, which refuses several chunks on one pipeline rank."""
    aligned = args.align_param_gather
    args.pipeline_model_parallel_layout = None
    validate()
    args.pipeline_model_parallel_layout = layout
    args.virtual_pipeline_model_parallel_size = chunks
    args.align_param_gather = aligned


def _check_batches(args: Namespace, job: Job) -> None:
    """Raises ConfigError if the schedule does not take the number of micro-batches of any batch, during a ramp-up
    too."""
    ranks = args.pipeline_model_parallel_size
    placement = placement_of(args.virtual_pipeline_model_parallel_size or 1, ranks)
    ramp = range(0)
    if args.rampup_batch_size:
        start, increment, _samples = map(int, args.rampup_batch_size)
        ramp = range(start, args.global_batch_size, increment)
    for batch in (*ramp, args.global_batch_size):
        program_spec(job.settings, placement, _micro_batches(args, batch), job.zero_stage)


def _micro_batches(args: Namespace, batch: int) -> int:
    return batch // (args.micro_batch_size * args.data_parallel_size)


def _unread_keys(job: Job) -> list[str]:
    """The keys of the file that have no effect. Keys of a section are named one by one if another key of it is read."""
    read = {"zero_optimization": "stage", **dict.fromkeys(PRECISIONS, "enabled")}
    unread = sorted(set(job.others) - {BLOCK, ACCUMULATION, *read, *SHARED_KEYS})
    for section, key in read.items():
        unread += [f"{section}.{name}" for name in job.others.get(section) or {} if name != key]
    return unread + [f"{BLOCK}.{key}" for key in MEANINGLESS if key in job.settings.model_fields_set]
