"""Seeds that depend on what is computed, not on where or when; and random states for recomputation, so that dropout
draws the same mask again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from operator import eq
from typing import Any, NamedTuple

import torch


def hashed_seed(*words: int | str) -> int:
    """Returns a seed of 64 bits. Different lists of words share a seed only by chance.

    torch's generator of the CPU takes the lower 32 bits.
    """
    return int.from_bytes(blake2b(repr(words).encode(), digest_size=8).digest(), "little")


class RandomSource(NamedTuple):
    """A random generator: its name, and functions to read its state, to set its state, to seed it with 64 bits and to
    compare two states."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    seed: Callable[[int], Any]
    same: Callable[[Any, Any], bool] = eq


def default_sources(device: torch.device) -> list[RandomSource]:
    """Returns torch's generators of the CPU and of ``device``."""
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
    """Returns the states of all sources. A state equal to its ``previous`` one is that same object."""
    states = [source.read() for source in sources]
    if previous is None:
        return states
    return [old if source.same(old, new) else new for source, old, new in zip(sources, previous, states)]


def write_states(sources: Sequence[RandomSource], states: Sequence[Any]) -> None:
    for source, state in zip(sources, states):
        source.write(state)


@contextmanager
def undisturbed(sources: Sequence[RandomSource]) -> Iterator[None]:
    """Restores the states after the block, as if nothing had been drawn in it."""
    states = read_states(sources)
    try:
        yield
    finally:
        write_states(sources, states)


class Draws:
    """Records the random states of forwards, so that recomputations draw the same numbers.

    A *visit* is a run of forwards of one chunk. The states are read before every forward of a visit. Some generators
    are slow to read, though, and few layers draw from them. If a visit did not draw from a source, the chunk's next
    visit reads that source only before its first and after its last forward.

    That next visit may draw from the source after all. Its recomputations then start from the state before the visit,
    and each one continues where the previous one stopped. This works because every schedule recomputes forwards in
    their order. After the last recomputation, :meth:`again` checks that the source has reached the state after the
    visit, unless no recomputation has drawn: another thread of the process has, and layers have nothing to repeat.
    """

    def __init__(self, sources: Sequence[RandomSource]) -> None:
        self.sources = sources
        self._visits: dict[tuple[int, int], _Visit] = {}
        """By chunk and micro-batch."""
        self._open: _Visit | None = None
        self._left_alone: dict[int, frozenset[int]] = {}
        """By chunk: indices of the sources that its last visit did not draw from."""
        self._last: list[Any] | None = None
        """The states read last. An equal state is not stored again."""

    def forward(self, chunk: int, micro_batch: int) -> None:
        """Records the states before a forward that will be recomputed."""
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
        """Ends the open visit, if there is one, and finds out which sources it drew from.

        Returns the states after the visit; None if no visit was open. The caller is about to run something else that
        may draw, such as a forward that will not be recomputed.
        """
        visit, self._open = self._open, None
        if visit is None:
            return None
        visit.after = tuple(self._read())
        pairs = enumerate(zip(visit.before, visit.after))
        self._left_alone[visit.chunk] = frozenset(index for index, (before, after) in pairs if before is after)
        return visit.after

    @contextmanager
    def again(self, chunk: int, micro_batch: int) -> Iterator[bool]:
        """Draws inside the block what the forward drew, then restores the states as if nothing had been drawn.

        Yields whether the block must draw every number of the forward, because the next recomputation continues from
        there. Raises RuntimeError if layers draw more or less often than in their forwards, from a source that was not
        read between those forwards.
        """
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
        """Returns the state before the visit of each unread source that was drawn from during the visit or since."""
        now = self._read()
        return {
            index: visit.before[index]
            for index in visit.unread
            if not (visit.before[index] is visit.after[index] is now[index])
        }

    def _check(self, visit: "_Visit") -> None:
        for index, state in (visit.repeated or {}).items():
            source = self.sources[index]
            if not source.same(state, visit.before[index]) and not source.same(state, visit.after[index]):
                raise RuntimeError(
                    f"chunk {visit.chunk} drew other random numbers when it was recomputed: a layer began to draw, and "
                    "not as often in both passes; let it draw equally in both, or set ds_lgamp.recompute to 'none'"
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
    """A run of forwards of ``chunk``.

    Args:
        unread: indices of the sources that are not read between the forwards.
        before: the states before the first forward.
    """

    def __init__(self, chunk: int, unread: frozenset[int], before: Sequence[Any]) -> None:
        self.chunk, self.unread, self.before = chunk, unread, tuple(before)
        self.after: tuple[Any, ...] = ()
        """The states after the last forward."""
        self.states: dict[int, dict[int, Any]] = {}
        """By micro-batch and source index: the state before each forward that is still to be recomputed."""
        self.repeated: dict[int, Any] | None = None
        """By index, for unread sources that were drawn from: the state from which the next recomputation continues.
        None before the first recomputation."""
