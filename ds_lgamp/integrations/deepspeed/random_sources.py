"""The generators layers under DeepSpeed may draw from."""

import random
import sys
from typing import Any

import numpy
import torch

from ds_lgamp.runtime.random_state import RandomSource, default_sources


def layer_sources(device: torch.device) -> list[RandomSource]:
    """Generators of torch, Python and NumPy and, where Megatron-core is in use, its tracker."""
    sources = [
        *default_sources(device),
        RandomSource(random.getstate, random.setstate),
        RandomSource(numpy.random.get_state, numpy.random.set_state, _same_numpy),
    ]
    megatron = sys.modules.get("megatron.core.tensor_parallel.random")
    if megatron is not None and megatron.get_cuda_rng_tracker().get_states():
        tracker = megatron.get_cuda_rng_tracker()
        # A copy: the tracker goes on with the very dictionary it gets.
        sources.append(RandomSource(tracker.get_states, lambda states: tracker.set_states(dict(states)), _same_tracked))
    return sources


def _same_numpy(first: Any, second: Any) -> bool:
    return first[2:] == second[2:] and numpy.array_equal(first[1], second[1])


def _same_tracked(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
