"""The random states a chunk's recomputation starts from, so that dropout draws the same mask again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import eq
from typing import Any, NamedTuple

import torch


class RandomSource(NamedTuple):
    """A generator somewhere: its name, how to read its state, how to set it, how to make one from a seed of 64 bits,
    and whether two states are the same."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    seed: Callable[[int], Any]
    same: Callable[[Any, Any], bool] = eq


def default_sources(device: torch.device) -> list[RandomSource]:
    """torch's generators of the CPU and of ``device``."""
    cpu = torch.default_generator
    sources = [RandomSource("torch", torch.get_rng_state, torch.set_rng_state, cpu.manual_seed, torch.equal)]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        sources.append(
            RandomSource(
                device.type,
                lambda: module.get_rng_state(device),
                lambda state: module.set_rng_state(state, device),
                module.manual_seed,
                torch.equal,
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

    A state is read before every forward. Some generators take long to tell theirs, though, and few layers draw from
    them: one that was left alone by a visit of a chunk, a run of its forwards, is read only before and after the
    chunk's next visit. Should that one draw from it after all, its recomputations, which come in the order of its
    forwards in every schedule, go on drawing each from where the one before stopped; that they arrive where the
    forwards did is checked.
    """

    def __init__(self, sources: Sequence[RandomSource]) -> None:
        self.sources = sources
        self._visits: dict[tuple[int, int], _Visit] = {}
        """By chunk and micro-batch."""
        self._open: _Visit | None = None
        self._left_alone: dict[int, frozenset[int]] = {}
        """By chunk, the numbers of the sources that its last visit did not draw from."""
        self._last: list[Any] | None = None
        """The states read last: an equal one is not stored again."""

    def forward(self, chunk: int, micro_batch: int) -> None:
        """Before a forward that will be recomputed."""
        visit = self._open
        if visit is None or visit.chunk != chunk:
            before = self.leave() or self._read()
            visit = self._open = _Visit(chunk, self._left_alone.get(chunk, frozenset()), before)
        visit.states[micro_batch] = {
            index: self._read_one(index) if visit.states else visit.before[index]
            for index in range(len(self.sources))
            if index not in visit.unread
        }
        self._visits[chunk, micro_batch] = visit

    def leave(self) -> Sequence[Any] | None:
        """Before anything else that may draw, such as a forward that will not be recomputed: ends the visit if one is
        open, and finds out what it drew from. Returns the states then."""
        visit, self._open = self._open, None
        if visit is None:
            return None
        visit.after = tuple(self._read())
        pairs = enumerate(zip(visit.before, visit.after))
        self._left_alone[visit.chunk] = frozenset(index for index, (before, after) in pairs if before is after)
        return visit.after

    @contextmanager
    def again(self, chunk: int, micro_batch: int) -> Iterator[bool]:
        """Draws inside the block what the forward drew, then goes on as if nothing had been drawn. Gives whether the
        block has to draw all of it. Raises RuntimeError if a layer draws more or less often than in its forward, where
        that cannot be made good."""
        self.leave()
        visit = self._visits.pop((chunk, micro_batch))
        if visit.repeated is None:
            visit.repeated = self._differing(visit)
        states = {**visit.states.pop(micro_batch), **visit.repeated}
        if not states:
            yield False
            return
        sources = [self.sources[index] for index in states]
        with undisturbed(sources):
            write_states(sources, list(states.values()))
            yield bool(visit.repeated)
            visit.repeated = {index: self.sources[index].read() for index in visit.repeated}
        if not visit.states:
            self._check(visit)

    def _differing(self, visit: "_Visit") -> dict[int, Any]:
        """The state before the visit of sources that were not read during it, but drawn from then or since."""
        now = self._read()
        return {
            index: visit.before[index]
            for index in visit.unread
            if not (visit.before[index] is visit.after[index] is now[index])
        }

    def _check(self, visit: "_Visit") -> None:
        for index, state in (visit.repeated or {}).items():
            if not self.sources[index].same(state, visit.after[index]):
                raise RuntimeError(
                    f"chunk {visit.chunk} drew other random numbers when it was recomputed: a layer began to draw, and "
                    "not as often in both passes; let it draw alike in both, or set ds_lgamp.recompute to 'none'"
                )

    def _read(self) -> list[Any]:
        self._last = read_states(self.sources, self._last)
        return self._last

    def _read_one(self, index: int) -> Any:
        assert self._last is not None, "a visit begins with a reading"
        source, state = self.sources[index], self.sources[index].read()
        if not source.same(self._last[index], state):
            self._last[index] = state
        return self._last[index]


class _Visit:
    """Forwards of ``chunk``, one after another.

    Args:
        unread: numbers of the sources that are not read between them.
        before: the states ahead of the first.
    """

    def __init__(self, chunk: int, unread: frozenset[int], before: Sequence[Any]) -> None:
        self.chunk, self.unread, self.before = chunk, unread, tuple(before)
        self.after: tuple[Any, ...] = ()
        self.states: dict[int, dict[int, Any]] = {}
        """By micro-batch and number of the source, the states ahead of a forward that is still to be recomputed."""
        self.repeated: dict[int, Any] | None = None
        """Of the others, as far as they were drawn from: where the next recomputation goes on; None ahead of it."""
