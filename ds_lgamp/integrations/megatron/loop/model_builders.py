"""Megatron-LM's builders of models, which releases from 0.18 on have beside ``get_model``."""

from collections.abc import Callable
from functools import partial, wraps
from inspect import signature
from typing import Any

import torch

from ds_lgamp.integrations.hosts import resolve
from ds_lgamp.integrations.megatron.loop.seams import BUILDERS
from ds_lgamp.integrations.megatron.loop.several_chunks import chunks_provider
from ds_lgamp.integrations.megatron.loop.sharded.install import sharded_model


def builder_replacements(begin: Callable[[], None], zero_stage: int) -> dict[Callable[..., Any], Callable[..., Any]]:
    """What takes the place of functions of the builders, in a Megatron-LM that has them.

    Args:
        begin: to be called before a rank builds its chunks.
        zero_stage: from 2 on, chunks are sharded.
    """
    builders = resolve(BUILDERS)
    if builders is None:
        return {}
    stages, models = builders.build_virtual_pipeline_stages, builders.unimodal_build_distributed_models
    return {stages: _also_on_one_rank(stages, begin), **({models: sharded_model(models)} if zero_stage > 1 else {})}


def _also_on_one_rank(stock: Callable[..., Any], begin: Callable[[], None]) -> Callable[..., Any]:
    """``build_virtual_pipeline_stages``, which otherwise builds one chunk on one pipeline rank."""

    @wraps(stock)
    def build(*positional: Any, **options: Any) -> list[torch.nn.Module]:
        begin()
        call = signature(stock).bind(*positional, **options)
        call.apply_defaults()
        given = call.arguments
        if given["vp_size"] is None or given["pg_collection"].pp.size() > 1:
            return stock(*positional, **options)
        chunks = chunks_provider(partial(given["build_model_func"], given["pg_collection"]), given["vp_size"])()
        chunks.model_type = given["model_type"]
        return chunks

    return build
