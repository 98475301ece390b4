"""Refuses checkpoints of Megatron-LM that were cut into other chunks.

Megatron-LM would silently load some weights into the wrong layers, or leave them out. The format ``torch`` numbers
layers within their chunk. The format ``torch_dist`` numbers layers in the whole model, but it saves the state of the
distributed optimizer by the buckets of the chunks, unless the state is fully reshardable.
"""

import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.megatron.loop.several_chunks import layers_of
from ds_lgamp.integrations.megatron.loop.sharded.model import ShardedChunk

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
