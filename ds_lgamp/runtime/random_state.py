"""The random states a chunk's recomputation restores, so that dropout draws the same mask again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class RandomSource(NamedTuple):
    """A generator somewhere: how to read its state and how to set it."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


def default_sources(device: torch.device) -> list[RandomSource]:
    """torch's generators of the CPU and of ``device``."""
    sources = [RandomSource(torch.get_rng_state, torch.set_rng_state)]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        sources.append(
            RandomSource(lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device))
        )
    return sources


def read_states(sources: Sequence[RandomSource]) -> list[Any]:
    return [source.read() for source in sources]


def write_states(sources: Sequence[RandomSource], states: Sequence[Any]) -> None:
    for source, state in zip(sources, states):
        source.write(state)


@contextmanager
def replayed(sources: Sequence[RandomSource], states: Sequence[Any]) -> Iterator[None]:
    """Draws inside the block as from ``states``, then goes on as if nothing had been drawn."""
    interrupted = read_states(sources)
    write_states(sources, states)
    try:
        yield
    finally:
        write_states(sources, interrupted)
