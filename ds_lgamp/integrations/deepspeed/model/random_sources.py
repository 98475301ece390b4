"""The random generators that layers under DeepSpeed may draw from."""

import random
import sys
from typing import Any

import numpy
import torch

from ds_lgamp.runtime.recompute import RandomSource, default_sources, hashed_seed


def layer_sources(device: torch.device) -> list[RandomSource]:
    """Returns the generators of torch, Python and NumPy, and the trackers of DeepSpeed and Megatron-core that are in
    use."""
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
    for name, module in _TRACKING.items():
        tracking = sys.modules.get(module)
        if tracking is not None and tracking.get_cuda_rng_tracker().get_states():
            sources.append(_tracked(name, tracking.get_cuda_rng_tracker(), device))
    return sources


_TRACKING = {
    "deepspeed": "deepspeed.runtime.activation_checkpointing.checkpointing",
    "megatron": "megatron.core.tensor_parallel.random",
}
"""The modules that have a tracker of random states, by what the tracker is called here."""


def _tracked(name: str, tracker: Any, device: torch.device) -> RandomSource:
    """Returns the states of a tracker: tensors, or generators that a CUDA graph can capture."""

    def read() -> dict[str, torch.Tensor]:
        states = tracker.get_states().items()
        return {key: state.get_state() if isinstance(state, torch.Generator) else state for key, state in states}

    def write(states: dict[str, torch.Tensor]) -> None:
        generators = {key: each for key, each in tracker.get_states().items() if isinstance(each, torch.Generator)}
        for key, generator in generators.items():
            generator.set_state(states[key])
        # A new dictionary, because the tracker keeps and changes the one that it gets.
        tracker.set_states({**states, **generators})

    return RandomSource(name, read, write, lambda seed: write(_seeded(read(), seed, device)), _same_tracked)


def _seeded(states: dict[str, torch.Tensor], seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns a state for every name in ``states``, each from a seed of its own."""
    return {name: torch.Generator(device).manual_seed(hashed_seed(seed, name)).get_state() for name in states}


def _same_numpy(first: Any, second: Any) -> bool:
    return first[2:] == second[2:] and numpy.array_equal(first[1], second[1])


def _same_tracked(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
