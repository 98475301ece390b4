"""Cuts the layers of a model into chunks, as the block says or as Megatron-LM's flags do, and refuses checkpoints of
Megatron-LM that were cut into other chunks.

Megatron-LM would silently load some weights of these into the wrong layers, or leave them out. The format ``torch``
numbers layers within their chunk. The format ``torch_dist`` numbers layers in the whole model, but it saves the state
of the distributed optimizer by the buckets of the chunks, unless the state is fully reshardable.
"""

import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import accumulate
from math import gcd
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import unwrap_model

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.megatron.loop.flags import (
    CHUNK_FLAGS,
    LAYOUT,
    OLD_PATTERN,
    PATTERN,
    RANK_FLAGS,
    option_of,
)
from ds_lgamp.integrations.megatron.loop.several_chunks import layers_of
from ds_lgamp.integrations.megatron.loop.sharded_model import ShardedChunk
from ds_lgamp.integrations.program_spec import bounds_by_speed, bounds_by_weight
from ds_lgamp.schedule.orders import SINGLE_CHUNK_SCHEDULES
from ds_lgamp.schedule.placement import split_by_count

_KEYS = ("chunks_per_rank", "layers_per_chunk", "pipeline_rank_speeds")
"""The keys of the block that cut the layers."""


class Cut(NamedTuple):
    """Chunks of a model, and the argument that tells Megatron-LM of them."""

    chunks: int
    value: str | None
    """None if Megatron-LM makes the same cut without."""
    argument: str = LAYOUT
    uncut: str | None = None
    """The value of the same layers in one chunk."""


def cut(args: Namespace, settings: LgampConfig) -> Cut:
    """Returns how the layers are cut. A layout, or a pattern of layers of several kinds, takes the place of the flags
    that it was made of.

    Raises ConfigError if the layers cannot be cut so, or if two settings cut them.
    """
    layout, ranks = getattr(args, LAYOUT), args.pipeline_model_parallel_size
    of_ranks, of_chunks = _given(args, RANK_FLAGS), _given(args, CHUNK_FLAGS)
    # Releases before 0.17 have no pattern with cuts.
    if hasattr(args, PATTERN) and (pattern := getattr(args, PATTERN) or getattr(args, OLD_PATTERN)):
        _refuse_two_cuts(option_of(PATTERN), settings, (), [*([LAYOUT] if layout else []), *of_ranks, *of_chunks])
        setattr(args, OLD_PATTERN, None)
        return _cut_pattern(pattern, settings, ranks)
    if layout is not None:
        _refuse_two_cuts(option_of(LAYOUT), settings, _KEYS, [*of_ranks, *of_chunks])
        return Cut(PipelineParallelLayerLayout.get_num_stages_from_str(layout), layout)
    if not of_ranks and not of_chunks:
        sizes = chunk_sizes(settings, _layers(args), ranks)
        return Cut(len(sizes), layout_of(sizes) if len(sizes) > ranks or len(set(sizes)) > 1 else None)
    if of_chunks:
        _refuse_two_cuts(option_of(of_chunks[0]), settings, _KEYS, of_chunks[1:])
    else:
        _refuse_two_cuts(option_of(of_ranks[0]), settings, _KEYS[1:], [])
    sizes = _sizes_by_flags(args, settings)
    if len(sizes) == ranks:
        return Cut(ranks, None)
    for name in (*of_ranks, *of_chunks):
        setattr(args, name, False if getattr(args, name) is True else None)
    return Cut(len(sizes), layout_of(sizes))


def _cut_pattern(pattern: str, settings: LgampConfig, ranks: int) -> Cut:
    """Returns how the layers of a HybridModel are cut: where ``pattern`` says so with "|", else as the block says.

    Each layer is a letter. Behind "/" come layers that predict several tokens, on the last rank.
    """
    layers, *predicting = pattern.split("/")
    chunks = layers.split("|")
    if len(chunks) > 1:
        _refuse_two_cuts(option_of(PATTERN), settings, _KEYS, [])
    else:
        sizes = chunk_sizes(settings, len(layers), ranks)
        chunks = [layers[end - size : end] for size, end in zip(sizes, accumulate(sizes))]
    if predicting and len(chunks) > ranks:
        raise ConfigError(
            f"{option_of(PATTERN)} is {pattern!r}, whose layers behind '/' have not been tried beside several chunks "
            f"on a rank; remove them, or set {BLOCK}.chunks_per_rank to 1"
        )
    value, uncut = ("/".join([separator.join(chunks), *predicting]) for separator in ("|", ""))
    return Cut(len(chunks), value, PATTERN, uncut)


def chunk_sizes(settings: LgampConfig, layers: int, pipeline_ranks: int) -> list[int]:
    """Returns the number of transformer layers of every chunk. Every pipeline rank gets as many chunks. Larger ones
    come first, unless ``pipeline_rank_speeds`` size them.

    Raises ConfigError if a chunk would have no layer, or if ranks would have different numbers of chunks.
    """
    if settings.pipeline_rank_speeds is not None:
        bounds = bounds_by_speed(settings, pipeline_ranks, range(layers + 1))
    elif settings.layers_per_chunk is not None:
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


def _sizes_by_flags(args: Namespace, settings: LgampConfig) -> list[int]:
    """Returns the number of transformer layers of every chunk, in the order of the model, as Megatron-core counts
    them."""
    of_ranks = _layers_of_ranks(args)
    chunks = _chunks_per_rank(args, settings, of_ranks)
    if chunks < 1 or any(layers % chunks for layers in of_ranks):
        raise ConfigError(
            f"the pipeline ranks have {of_ranks} layers, which {chunks} chunks on each cannot share equally; set "
            f"{option_of(CHUNK_FLAGS[0])} or {BLOCK}.chunks_per_rank to a divisor, or cut the layers with "
            f"{option_of(LAYOUT)}"
        )
    sizes = [layers // chunks for _ in range(chunks) for layers in of_ranks]
    sizes[0] -= bool(args.account_for_embedding_in_pipeline_split)
    sizes[-1] -= bool(args.account_for_loss_in_pipeline_split)
    return sizes


def _layers_of_ranks(args: Namespace) -> list[int]:
    """Returns the number of layers of every pipeline rank. The embedding and the loss count as layers if flags say
    so."""
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    counted = [bool(args.account_for_embedding_in_pipeline_split), bool(args.account_for_loss_in_pipeline_split)]
    ends = [layers for layers in (first, last) if layers is not None]
    if ends and any(counted):
        given = " and ".join(map(option_of, _given(args, RANK_FLAGS)))
        raise ConfigError(f"{given} are given, which Megatron-core does not take together; remove one of them")
    left, ranks = _layers(args) + sum(counted) - sum(ends), args.pipeline_model_parallel_size - len(ends)
    if min(ends, default=1) < 1 or min(left, ranks) < 0 or bool(left) != bool(ranks) or (ranks and left % ranks):
        given = "".join(f" and {option_of(name)} is {getattr(args, name)}" for name in _given(args, RANK_FLAGS))
        raise ConfigError(
            f"--num-layers is {_layers(args)}{given}, which leaves {left} layers to {ranks} pipeline ranks; let the "
            f"ranks divide the layers, or cut them with {option_of(LAYOUT)}"
        )
    middle = [left // ranks] * ranks if ranks else []
    return [*([] if first is None else [first]), *middle, *([] if last is None else [last])]


def _chunks_per_rank(args: Namespace, settings: LgampConfig, of_ranks: Sequence[int]) -> int:
    """Returns the number of chunks on every rank. If nothing says it, there are as many as can be."""
    if args.num_virtual_stages_per_pipeline_rank is not None:
        return args.num_virtual_stages_per_pipeline_rank
    each = args.num_layers_per_virtual_pipeline_stage
    if each is None:
        default = 1 if settings.schedule in SINGLE_CHUNK_SCHEDULES else gcd(*of_ranks)
        return settings.chunks_per_rank or default
    if each < 1 or len(set(of_ranks)) > 1 or of_ranks[0] % each:
        raise ConfigError(
            f"{option_of(CHUNK_FLAGS[1])} is {each}, but the pipeline ranks have {list(of_ranks)} layers; use a "
            f"divisor of them, or {option_of(CHUNK_FLAGS[0])}"
        )
    return of_ranks[0] // each


def _layers(args: Namespace) -> int:
    return args.num_layers or args.decoder_num_layers


def _given(args: Namespace, names: Sequence[str]) -> list[str]:
    # A number that is 0 is given, and will be refused.
    return [name for name in names if not any(getattr(args, name) is unset for unset in (None, False))]


def _refuse_two_cuts(option: str, settings: LgampConfig, keys: Sequence[str], others: Sequence[str]) -> None:
    second = [f"{BLOCK}.{key}" for key in keys if getattr(settings, key) is not None] + [*map(option_of, others)]
    if second:
        raise ConfigError(f"{option} and {second[0]} both cut the layers; keep one of them")


_LAYER = re.compile(r"(?:decoder|encoder)\.layers\.(\d+)\.")
_CUTS = ("pipeline_model_parallel_layout", "virtual_pipeline_model_parallel_size", "ddp_bucket_size", "ddp_num_buckets")
"""Arguments that decide which parameters share a bucket. Megatron-LM itself compares the numbers of ranks."""
_FULLY_RESHARDABLE = ("fully_reshardable", "fully_sharded_model_space")
_RESHARD = "or save the weights with --ckpt-format torch_dist, which loads at any number of chunks"


def checked_loaders(
    load: Callable[..., Any], read: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Replacements for Megatron-LM's ``load_checkpoint``, and for ``_load_base_checkpoint``, with which it reads files.

    The replacements raise ConfigError for a checkpoint that was cut into other chunks.
    """
    loading: list[Sequence[torch.nn.Module]] = []

    @wraps(load)
    def load_checkpoint(ddp_model: Sequence[torch.nn.Module], *positional: Any, **options: Any) -> Any:
        loading.append(ddp_model)
        try:
            return load(ddp_model, *positional, **options)
        finally:
            loading.pop()

    @wraps(read)
    def _load_base_checkpoint(load_dir: Any, args: Namespace, rank0: bool = False, **options: Any) -> Any:
        found = read(load_dir, args, rank0=rank0, **options)
        state, kind = found[0], found[3]
        # Outside of load_checkpoint, Megatron-LM reads only the arguments.
        if loading and state and kind is not None:
            # With rank0, the file is the first rank's.
            if kind.name == "LEGACY" and not rank0:
                refuse_other_chunks(loading[-1], state, load_dir)
                refuse_whole_state(args, loading[-1], load_dir)
            if kind.name == "GLOBAL" and "content_metadata" in state:
                refuse_other_buckets(args, state, load_dir)
        return found

    return load_checkpoint, _load_base_checkpoint


def refuse_other_chunks(models: Sequence[torch.nn.Module], state: Mapping[str, Any], folder: Any) -> None:
    """Raises ConfigError unless a file of the format ``torch`` has the layers of ``models``, chunk by chunk."""
    wanted = [len(layers_of(model)) for model in unwrap_model(list(models))]
    held = _layers_held(state)
    if max(len(wanted), len(held)) > 1 and wanted != held:
        raise ConfigError(
            f"--load {folder} has chunks of {held} layers on this pipeline rank, but this run has chunks of {wanted}; "
            f"set {BLOCK}.chunks_per_rank or --pipeline-model-parallel-layout to what the checkpoint was saved with, "
            f"{_RESHARD}"
        )


def refuse_whole_state(args: Namespace, models: Sequence[torch.nn.Module], folder: Any) -> None:
    """Raises ConfigError if sharded ``models`` are to take the optimizer's state from a file of format ``torch``."""
    if isinstance(models[0], ShardedChunk) and not (args.finetune or args.no_load_optim):
        raise ConfigError(
            f"--load {folder} has the format torch, whose optimizer state stages 2 and 3 cannot take; load it with "
            "--no-load-optim, or save it with --ckpt-format torch_dist"
        )


def _layers_held(state: Mapping[str, Any]) -> list[int]:
    """Returns the number of layers of every chunk in a file of the format ``torch``."""
    chunks = [state["model"]] if "model" in state else []
    while f"model{len(chunks)}" in state:
        chunks.append(state[f"model{len(chunks)}"])
    return [len({found[1] for name in chunk if (found := _LAYER.search(name))}) for chunk in chunks]


def refuse_other_buckets(args: Namespace, state: Mapping[str, Any], folder: Any) -> None:
    """Raises ConfigError if the distributed optimizer's state was saved by buckets other than those of this run."""
    sharding = (state["content_metadata"] or {}).get("distrib_optim_sharding_type", _FULLY_RESHARDABLE[0])
    loads_optimizer = args.use_distributed_optimizer and not (args.finetune or args.no_load_optim)
    if sharding in _FULLY_RESHARDABLE or not loads_optimizer:
        return
    saved = state.get("args", Namespace())
    for name in _CUTS:
        before, now = (str(getattr(source, name, None)) for source in (saved, args))
        if before != now:
            raise ConfigError(
                f"{name} is {now}, but was {before} when --load {folder} was saved, and the optimizer state follows "
                "its buckets; make them equal, save with --dist-ckpt-optim-fully-reshardable, or load without the "
                "optimizer state with --no-load-optim"
            )
