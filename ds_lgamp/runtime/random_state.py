"""The random states a chunk's recomputation restores, so that dropout draws the same mask again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import eq
from typing import Any, NamedTuple

import torch


class RandomSource(NamedTuple):
    """A generator somewhere: how to read its state, how to set it, and whether two states are the same."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    same: Callable[[Any, Any], bool] = eq


def default_sources(device: torch.device) -> list[RandomSource]:
    """torch's generators of the CPU and of ``device``."""
    sources = [RandomSource(torch.get_rng_state, torch.set_rng_state, torch.equal)]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        sources.append(
            RandomSource(
                lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device), torch.equal
            )
        )
    return sources


def read_states(sources: Sequence[RandomSource], previous: Sequence[Any] | None = None) -> list[Any]:
    """The states of all sources. One that equals its ``previous`` state is that very object: states weigh kilobytes,
    and there is one for every chunk and micro-batch."""
    states = [source.read() for source in sources]
    if previous is None:
        return states
    return [old if source.same(old, new) else new for source, old, new in zip(sources, previous, states)]


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
