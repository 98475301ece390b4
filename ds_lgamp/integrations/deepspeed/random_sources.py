"""The generators layers under DeepSpeed may draw from."""

import random
import sys

import numpy
import torch

from ds_lgamp.runtime.random_state import RandomSource, default_sources


def layer_sources(device: torch.device) -> list[RandomSource]:
    """Generators of torch, Python and NumPy and, where Megatron-core is in use, its tracker."""
    sources = [
        *default_sources(device),
        RandomSource(random.getstate, random.setstate),
        RandomSource(numpy.random.get_state, numpy.random.set_state),
    ]
    megatron = sys.modules.get("megatron.core.tensor_parallel.random")
    if megatron is not None and megatron.get_cuda_rng_tracker().get_states():
        tracker = megatron.get_cuda_rng_tracker()
        sources.append(RandomSource(tracker.get_states, tracker.set_states))
    return sources
