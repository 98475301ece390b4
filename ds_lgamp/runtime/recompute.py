"""What a recomputation of a forward needs: the random states of the forward, and places for its saved tensors.

Random states are restored so that dropout draws the same mask again. Seeds depend on what is computed, not on where or
when.

The tensors that autograd saves in the forward are dropped, and restored by computing the forward again.

The graph of the first forward stays without its tensors. The second forward stops when it has restored the last of
them. Anything after that, such as the product of a last linear layer, is not computed again (as in the early stop of
torch.utils.checkpoint).

The stop is inside the operation that saves the last tensor, and some operations save a tensor before they write it,
such as the noise of RReLU. They write only tensors that need no gradient, because autograd lets no operation change
what it has saved and needs the gradient of. So the second forward goes on to its end where that operation saves a
tensor that needs none and is no parameter.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from operator import eq
from typing import Any, NamedTuple, NoReturn

import torch
from torch._C._autograd import _get_sequence_nr as started_operations
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter


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

    @property
    def any(self) -> bool:
        """Whether the last visit of a chunk drew random numbers."""
        return any(len(alone) < len(self.sources) for alone in self._left_alone.values())

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
        if self._open is not None:
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

    def forget(self, chunk: int, micro_batch: int) -> None:
        """Leaves out a recomputation whose layers draw nothing, as the caller makes sure."""
        self.leave()
        self._visits.pop((chunk, micro_batch)).states.pop(micro_batch)

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


class _Slot:
    """The place of one saved tensor. The graph holds it."""

    __slots__ = ("kind", "tensor", "version")

    version: int

    def __init__(self, kind: tuple[torch.Size, torch.dtype]) -> None:
        self.kind = kind
        self.tensor: torch.Tensor | None = None


class _Stop(BaseException):
    """Signals that the last saved tensor is restored, or another one than the first forward saved. It is not an
    Exception, so layers that catch exceptions let it pass."""


class _Dropping(saved_tensors_hooks):
    """Saves places instead of tensors inside the block."""

    now = 0
    """How many such blocks are entered."""

    def __enter__(self) -> None:
        super().__enter__()
        _Dropping.now += 1

    def __exit__(self, *error: Any) -> None:
        _Dropping.now -= 1
        super().__exit__(*error)


def is_dropping() -> bool:
    """Whether a forward runs whose saved tensors are dropped, because it will be computed again."""
    return _Dropping.now > 0


class SavedTensors:
    """The saved tensors of one forward."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []

    def dropped(self) -> saved_tensors_hooks:
        """Returns a context for the first forward. Its graph saves places instead of tensors."""
        return _Dropping(self._drop, _fetch)

    def restore(self, compute: Callable[[], Any], completely: bool) -> None:
        """Fills the places by calling ``compute``, which repeats the first forward.

        Args:
            completely: whether ``compute`` must run to its end.

        Raises RuntimeError if ``compute`` saves other tensors than the first forward did.
        """
        # From now on only the graph holds the places. It drops each one after use.
        slots, self._slots = self._slots, []
        if not slots and not completely:
            return
        filled, unsafe = 0, -1
        other: tuple[object, object] | None = None
        stopped = False

        def fill(tensor: torch.Tensor) -> None:
            nonlocal filled, unsafe, other, stopped
            if filled < len(slots):
                slot = slots[filled]
                if slot.kind != (tensor.shape, tensor.dtype):
                    other, stopped = (slot.kind, (tensor.shape, tensor.dtype)), True
                    raise _Stop
                slot.tensor, slot.version = tensor.detach() if tensor.requires_grad else tensor, tensor._version
            filled += 1
            if completely:
                return
            if not tensor.requires_grad and not _is_parameter(tensor):
                unsafe = started_operations()
            if filled == len(slots) and unsafe != started_operations():
                stopped = True
                raise _Stop

        try:
            with saved_tensors_hooks(fill, _refuse_early_backward):
                compute()
        except BaseException:
            # TorchScript makes another error of the signal.
            if not stopped:
                raise
        if other is None and filled != len(slots):
            other = f"{len(slots)} tensors", filled
        if other is not None:
            raise RuntimeError(_OTHER.format(*other))

    def _drop(self, tensor: torch.Tensor) -> _Slot:
        slot = _Slot((tensor.shape, tensor.dtype))
        self._slots.append(slot)
        return slot


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Returns whether ``tensor`` is a parameter or a view of one, such as the transposed weight of a linear layer."""
    return isinstance(tensor if tensor._base is None else tensor._base, Parameter)


_OTHER = (
    "a chunk saved {} in its forward and {} when it was recomputed; let its layers do the same both times, or set "
    "ds_lgamp.recompute to 'none'"
)


def _fetch(slot: _Slot) -> torch.Tensor:
    tensor = slot.tensor
    if tensor is None:
        _refuse_early_backward()
    if tensor._version != slot.version:
        raise RuntimeError(
            "a tensor that the backward pass needs was changed in place after it was saved; let the layer that changes "
            "it work on a copy"
        )
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0:
        raise RuntimeError(
            "the memory of a tensor that the backward pass needs was freed when the chunk was recomputed; let layers "
            "not recompute parts of themselves in this way, or set ds_lgamp.recompute to 'selective'"
        )
    return tensor


def _refuse_early_backward(_: Any = None) -> NoReturn:
    raise RuntimeError(
        "gradients were asked for before the backward pass of a chunk, inside a forward or through another chunk's "
        "graph; set ds_lgamp.recompute to 'none'"
    )
