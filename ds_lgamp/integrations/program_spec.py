"""The program that the block asks for: the bounds of chunks, their placement, the micro-batches of every rank. Also how
much memory it may take."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.fields import with_unit
from ds_lgamp.schedule.actions import Action
from ds_lgamp.schedule.orders import default_placement
from ds_lgamp.schedule.placement import (
    Placement,
    place_chunks,
    shares_by_speed,
    split_automatic,
    split_balanced,
    split_by_count,
    split_by_speed,
    split_evenly,
)
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.validate import validate

HPZ, MICS = "zero_hpz_partition_size", "mics_shard_size"
"""The keys of zero_optimization that ask for hierarchical shards."""
MOST_MICRO_BATCHES = 100_000
"""The most micro-batches of a step. A program of more would take minutes to build, or not fit into memory."""


def refuse_split(settings: LgampConfig, whose: str) -> None:
    """Raises ConfigError for keys that say how to split a model, but here ``whose`` layers are given."""
    for key in ("model", "blocks", "dummy_inputs"):
        if getattr(settings, key) is not None:
            raise ConfigError(f"{BLOCK}.{key} is set, but {whose} says what its layers are; remove it")


def chunk_bounds(
    settings: LgampConfig, pipeline_ranks: int, layer_types: Sequence[str], layer_weights: Sequence[float]
) -> list[int]:
    """The C + 1 bounds of the chunks in the layer list, for ranks with more than one chunk.

    Args:
        layer_types: the class name of every layer, for automatic chunks.
        layer_weights: the weight of every layer, which ``chunks_per_rank`` balances.

    Raises ConfigError if a rank would get no chunk, or if the schedule does not take so many.
    """
    layers = len(layer_types)
    if layers < pipeline_ranks:
        raise ConfigError(
            f"num_stages of the PipelineModule is {pipeline_ranks}, but it has {layers} layers; use at most as many "
            "pipeline ranks as layers"
        )
    if settings.pipeline_rank_speeds is not None:
        return bounds_by_speed(settings, pipeline_ranks, split_automatic(layer_types))
    if settings.fixed_chunks_per_rank is not None:
        return bounds_by_weight(settings.fixed_chunks_per_rank, pipeline_ranks, layer_weights)
    if settings.layers_per_chunk is not None:
        bounds = split_by_count(layers, settings.layers_per_chunk)
        cut = f"{BLOCK}.layers_per_chunk is {settings.layers_per_chunk}, which cuts {layers} layers"
        most = layers if pipeline_ranks == 1 else (layers - 1) // (pipeline_ranks - 1)
        fix = f"use at most {most}"
    else:
        bounds = _rounded(split_automatic(layer_types), settings, pipeline_ranks)
        cut = f"neither {BLOCK}.chunks_per_rank nor {BLOCK}.layers_per_chunk is given, which cuts {layers} layers"
        fix = f"set {BLOCK}.chunks_per_rank"
    chunks = len(bounds) - 1
    if chunks < pipeline_ranks:
        raise ConfigError(f"{cut} into {chunks} chunks for {pipeline_ranks} pipeline ranks; {fix}")
    if settings.schedule == "interleaved_1f1b" and chunks % pipeline_ranks:
        raise ConfigError(
            f"{cut} into {chunks} chunks, but schedule 'interleaved_1f1b' needs a multiple of {pipeline_ranks} "
            f"pipeline ranks; set {BLOCK}.chunks_per_rank instead"
        )
    return bounds


def _rounded(blocks: Sequence[int], settings: LgampConfig, pipeline_ranks: int) -> list[int]:
    """Bounds of as many chunks of whole blocks as make the same number on every rank. So the last rank has the last
    chunk, and with it the loss, where scripts for stock DeepSpeed look for it.

    Args:
        blocks: the bounds of the model's blocks in its layer list.
    """
    count = len(blocks) - 1
    chunks = count - count % pipeline_ranks
    if _kind_of_placement(settings) != "modular" or chunks == 0:
        return list(blocks)
    return [blocks[bound] for bound in split_evenly(count, chunks)]


def bounds_by_speed(settings: LgampConfig, pipeline_ranks: int, blocks: Sequence[int]) -> list[int]:
    """Bounds of equally many chunks for each pipeline rank, whose sizes follow ``pipeline_rank_speeds``.

    Args:
        blocks: the bounds of the model's blocks in its layer list; chunks hold whole blocks.

    Raises ConfigError if the speeds are not one for each rank, or if a chunk would be empty.
    """
    speeds, layers = settings.pipeline_rank_speeds or [], len(blocks) - 1
    _check_speeds("pipeline_rank_speeds", speeds, pipeline_ranks, "pipeline")
    if layers < pipeline_ranks:
        raise ConfigError(
            f"{BLOCK}.pipeline_rank_speeds is {speeds}, but the model has {layers} layers of its most frequent class "
            f"for {pipeline_ranks} pipeline ranks; remove it, or use at most {layers} pipeline ranks"
        )
    given = 1 if settings.one_chunk_per_rank else settings.fixed_chunks_per_rank
    per_rank = given or min(shares_by_speed(layers, speeds))
    if per_rank * pipeline_ranks > layers:
        raise ConfigError(
            f"{BLOCK}.chunks_per_rank is {per_rank}: with pipeline_rank_speeds, {pipeline_ranks} pipeline ranks would "
            f"need {per_rank * pipeline_ranks} layers of the most frequent class, the model has {layers}; use at most "
            f"{layers // pipeline_ranks}"
        )
    placement = place(settings, per_rank * pipeline_ranks, pipeline_ranks)
    return [blocks[bound] for bound in split_by_speed(layers, placement, speeds)]


def micro_batch_shares(settings: LgampConfig, micro_batches: int, data_ranks: int) -> list[int]:
    """How many micro-batches each data-parallel rank computes in a step.

    Args:
        micro_batches: those of a rank if all computed equally many.

    Raises ConfigError if ``data_rank_speeds`` are not one for each rank, or if there are too many micro-batches.
    """
    _check_micro_batches(micro_batches)
    speeds = settings.data_rank_speeds
    if speeds is None:
        return [micro_batches] * data_ranks
    _check_speeds("data_rank_speeds", speeds, data_ranks, "data-parallel")
    return shares_by_speed(micro_batches * data_ranks, speeds)


def _check_micro_batches(micro_batches: int) -> None:
    if micro_batches > MOST_MICRO_BATCHES:
        raise ConfigError(
            f"gradient_accumulation_steps makes {micro_batches} micro-batches of a step, and a program lists them all; "
            f"use at most {MOST_MICRO_BATCHES}"
        )


def _check_speeds(key: str, speeds: Sequence[float], ranks: int, kind: str) -> None:
    if len(speeds) != ranks:
        raise ConfigError(
            f"{BLOCK}.{key} is {speeds}, {len(speeds)} speeds for {ranks} {kind} ranks; give one for each rank"
        )


def bounds_by_weight(chunks_per_rank: int, pipeline_ranks: int, layer_weights: Sequence[float]) -> list[int]:
    """Bounds of ``chunks_per_rank`` chunks for each pipeline rank, as equal in weight as possible. Of equal
    layers, the first chunks take one more each.

    Raises ConfigError if there are more chunks than layers.
    """
    chunks, layers = pipeline_ranks * chunks_per_rank, len(layer_weights)
    if chunks > layers:
        raise ConfigError(
            f"{BLOCK}.chunks_per_rank is {chunks_per_rank}: {pipeline_ranks} pipeline ranks would need {chunks} "
            f"layers, the model has {layers}; use at most {layers // pipeline_ranks}"
        )
    return split_balanced(layer_weights, chunks)


def place(settings: LgampConfig, chunks: int, pipeline_ranks: int) -> Placement:
    """The pipeline rank of every chunk. There must be at least as many chunks as ranks."""
    return place_chunks(_kind_of_placement(settings), chunks, pipeline_ranks)


def _kind_of_placement(settings: LgampConfig) -> str:
    return settings.placement or default_placement(settings.schedule)


def program_spec(
    settings: LgampConfig, placement: Placement, micro_batches: int, zero_stage: int, **others: Any
) -> ProgramSpec:
    """The spec from which the programs of a training step are built. Raises ConfigError if the batch does not fit the
    schedule.

    Args:
        others: fields of the spec on which the host decides.
    """
    _check_micro_batches(micro_batches)
    group = micro_batches if settings.micro_batch_group == "all" else min(settings.micro_batch_group, micro_batches)
    pipeline_ranks = max(placement) + 1
    if settings.schedule == "interleaved_1f1b" and micro_batches % pipeline_ranks:
        raise ConfigError(
            f"{BLOCK}.schedule is 'interleaved_1f1b', which needs a multiple of {pipeline_ranks} (pipeline ranks) "
            f"micro-batches, but a batch has {micro_batches} (gradient_accumulation_steps, or Megatron-LM's "
            "--global-batch-size); change that, or use 'layered'"
        )
    postpones = others.get("updates") == "next_step" or others.get("offload") is not None
    try:
        return ProgramSpec(
            placement,
            settings.schedule,
            micro_batches,
            group,
            zero_stage,
            settings.resident_chunks,
            defers_gathers=settings.defer_gathers or (zero_stage > 0 and postpones),
            stores_inputs=settings.offload_activations != "none",
            recomputes=settings.recompute in ("full", "auto"),
            overlaps_exchanges=settings.overlap_exchanges,
            returns_outputs=settings.outputs == "all",
            split_backward=pipeline_ranks if settings.split_backward is True else int(settings.split_backward),
            **others,
        )
    except ValueError as error:
        raise ConfigError(f"{BLOCK}.{error}") from None


def program_of(spec: ProgramSpec, pipeline_rank: int) -> list[Action]:
    """The program of a pipeline rank. Raises ProgramError if that of any rank is faulty, or if they deadlock."""
    program = build_program(spec)
    validate(spec, program)
    return program[pipeline_rank]


def shard_groups(config: Mapping[str, Any]) -> dict[str, int]:
    """Returns the keys of ``config`` that ask for hierarchical shards, and their values, without those that switch them
    off: 0 and 1 ranks for hpZ, -1 for MiCS."""
    section = config.get("zero_optimization")
    if not isinstance(section, dict):
        return {}
    off = {HPZ: (None, 0, 1), MICS: (None, -1)}
    return {name: section[name] for name, values in off.items() if section.get(name) not in values}


def budget_of(settings: LgampConfig, device: str) -> int | None:
    """Returns the bytes of ``recompute_memory``; None for what the device has left. Raises ConfigError if the key is
    missing where the ``device`` is "cpu"."""
    if settings.recompute == "auto" and settings.recompute_bytes is None and device == "cpu":
        raise ConfigError(
            f"{BLOCK}.recompute is 'auto', but a CPU has no memory of its own to fill; set {BLOCK}.recompute_memory, "
            "such as '8 GB'"
        )
    return settings.recompute_bytes


def over_budget(limit: int, rank: int, needed: int) -> str | None:
    """Returns a sentence if a rank that recomputes everything needs more than the limit; else None."""
    if needed <= limit:
        return None
    # Rounded to three digits, the number must not be too small.
    enough = with_unit(1.005 * needed, "B")
    return (
        f"{BLOCK}.recompute is 'auto', which may take {with_unit(limit, 'B')} of memory, but rank {rank} needs "
        f"{enough} although it recomputes everything; set recompute_memory to at least that, or use "
        "smaller micro-batches"
    )


def advise_on_memory(error: RuntimeError, kept: int, budget: int, fitted: int, needed: int) -> NoReturn:
    """Raises an error in place of one that says that a device had too little memory although the peak is within the
    budget. It also says what to do. Nothing can be tried again: parts of the batch are read, sent and added up.

    Args:
        error: of an action, which failed. The other error has the same type.
        kept: of how many forwards autograd kept what it saved.
        budget: bytes that tensors might take.
        fitted: the peak by the formula before the failure.
        needed: the peak by the formula if everything is recomputed.
    """
    advice = "nothing was kept yet: use smaller micro-batches, a smaller micro_batch_group, or more ranks"
    if kept:
        # Rounded to three digits, what is needed must not be too small, and what has fitted not too large.
        less = with_unit(max(1.005 * needed, min(0.9 * budget, 0.995 * fitted)), "B")
        advice = f"autograd kept what it saved of {kept} forwards; set recompute_memory to '{less}'"
    raise type(error)(f"{error}; with {BLOCK}.recompute 'auto', {advice}") from error.__cause__
