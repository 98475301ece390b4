"""The random states a chunk's recomputation starts from, so that dropout draws the same mask again."""

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
    """The states of all sources. One that equals its ``previous`` state is that very object."""
    states = [source.read() for source in sources]
    if previous is None:
        return states
    return [old if source.same(old, new) else new for source, old, new in zip(sources, previous, states)]


def write_states(sources: Sequence[RandomSource], states: Sequence[Any]) -> None:
    for source, state in zip(sources, states):
        source.write(state)


@contextmanager
def undisturbed(sources: Sequence[RandomSource]) -> Iterator[None]:
    """What is drawn inside the block is as if it had not been drawn."""
    states = read_states(sources)
    try:
        yield
    finally:
        write_states(sources, states)


class Draws:
    """What chunks drew in their forwards, for recomputations to draw it again.

    States take microseconds to read and kilobytes to store, so they are read for every visit, a run of forwards of one
    chunk, not for every micro-batch. Backwards of a chunk come in the order of its forwards, in every schedule, so
    each recomputation goes on drawing from where the one before stopped.
    """

    def __init__(self, sources: Sequence[RandomSource]) -> None:
        self.sources = sources
        self._visits: dict[tuple[int, int], _Visit] = {}
        """By chunk and micro-batch."""
        self._open: _Visit | None = None

    def forward(self, chunk: int, micro_batch: int) -> None:
        """Before a forward that will be recomputed."""
        if self._open is None or self._open.chunk != chunk:
            self._open = _Visit(chunk, self._close() or read_states(self.sources))
        self._visits[chunk, micro_batch] = self._open

    @contextmanager
    def again(self, chunk: int, micro_batch: int) -> Iterator[None]:
        """Draws inside the block what the forward drew, then goes on as if nothing had been drawn."""
        self._close()
        visit = self._visits.pop((chunk, micro_batch))
        if visit.repeated is None:
            visit.repeated = self._differing(visit)
        if not visit.repeated:
            yield
            return
        sources = [self.sources[index] for index in visit.repeated]
        with undisturbed(sources):
            write_states(sources, list(visit.repeated.values()))
            yield
            visit.repeated = dict(zip(visit.repeated, read_states(sources)))

    def _close(self) -> list[Any] | None:
        """Ends the visit if one is open, and returns the states then."""
        visit, self._open = self._open, None
        if visit is None:
            return None
        visit.after = read_states(self.sources, visit.before)
        return visit.after

    def _differing(self, visit: "_Visit") -> dict[int, Any]:
        """By number of the source, the state before the visit; without those that nobody has drawn from since."""
        now = read_states(self.sources, visit.before)
        states = enumerate(zip(visit.before, visit.after, now))
        return {index: before for index, (before, *later) in states if any(state is not before for state in later)}


class _Visit:
    """Forwards of ``chunk``, one after another."""

    def __init__(self, chunk: int, before: list[Any]) -> None:
        self.chunk = chunk
        self.before = before
        """The states before the first."""
        self.after: list[Any] = []
        self.repeated: dict[int, Any] | None = None
        """The states the next recomputation starts from, by number of the source; None before the first one."""
