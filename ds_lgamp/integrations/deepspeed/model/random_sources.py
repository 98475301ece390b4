"""The random generators that layers under DeepSpeed may draw from."""

import random
import sys
from typing import Any

import numpy
import torch

from ds_lgamp.runtime.random_state import RandomSource, default_sources
from ds_lgamp.runtime.reproducible import hashed_seed


def layer_sources(device: torch.device) -> list[RandomSource]:
    """Returns the generators of torch, Python and NumPy, and Megatron-core's tracker if it is in use."""
    sources = [
        *default_sources(device),
        RandomSource("python", random.getstate, random.setstate, random.seed),
        RandomSource(
            "numpy",
            numpy.random.get_state,
            numpy.random.set_state,
            lambda seed: numpy.random.seed(seed % 2**32),
            _same_numpy,
        ),
    ]
    megatron = sys.modules.get("megatron.core.tensor_parallel.random")
    if megatron is not None and megatron.get_cuda_rng_tracker().get_states():
        tracker = megatron.get_cuda_rng_tracker()
        sources.append(
            RandomSource(
                "megatron",
                tracker.get_states,
                # Copied, because the tracker keeps and changes the dictionary that it gets.
                lambda states: tracker.set_states(dict(states)),
                lambda seed: tracker.set_states(_seeded(tracker.get_states(), seed, device)),
                _same_tracked,
            )
        )
    return sources


def _seeded(states: dict[str, torch.Tensor], seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns a state for every name in ``states``, each from a seed of its own."""
    return {name: torch.Generator(device).manual_seed(hashed_seed(seed, name)).get_state() for name in states}


def _same_numpy(first: Any, second: Any) -> bool:
    return first[2:] == second[2:] and numpy.array_equal(first[1], second[1])


def _same_tracked(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
