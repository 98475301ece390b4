"""Which forwards of a pipeline rank autograd keeps within a budget of memory, as recompute "auto" decides it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import sub
from typing import NamedTuple

from ds_lgamp.cost.activations import ActivationBytes, ChunkBytes
from ds_lgamp.schedule.actions import Action, Kind

Pair = tuple[int, int]
"""A chunk and a micro-batch."""


class Decision(NamedTuple):
    """What a rank does not recompute. The names are those of ProgramSpec's fields."""

    kept: frozenset[Pair] = frozenset()
    """The pairs of which autograd keeps what it saves."""
    selective: frozenset[Pair] = frozenset()
    """The kept pairs whose layers recompute a part of themselves."""

    @property
    def saves(self) -> tuple[int, int]:
        """How much compute it saves, in an order."""
        return len(self.kept), -len(self.selective)


_SPACE = 0.05
"""The part of the memory that a device has left which "auto" leaves to what lies between tensors."""


def space_left(memory: int) -> int:
    """Returns the bytes that tensors may take of the ``memory`` of a device."""
    return int((1 - _SPACE) * memory)


def kept_within(
    budget: int,
    build: Callable[[Decision], Sequence[Action]],
    follow: Callable[[Sequence[Action]], Sequence[int]],
    size: ActivationBytes,
) -> Decision:
    """Returns the pairs of a pipeline rank of which autograd may keep what it saves, so that the peak of a step stays
    within a budget. Returns none if even recomputing all pairs takes more.

    Pairs that are alive shortest come first, as far as they save equally much compute per byte. Each is kept if the
    peak then stays within the budget on paper, where a pair takes its bytes from its forward to its backward. Where
    layers can recompute a part of themselves, they do so at first. What is left of the budget then lets some keep all.
    On paper, chunks share nothing, so the formula has the last word: it corrects the budget on paper until both agree.

    Args:
        budget: bytes.
        build: returns the program of the rank under a decision.
        follow: returns the peak during each action of such a program.
        size: the bytes of chunks that may be kept, in every way.
    """
    actions = build(Decision())
    during = follow(actions)
    spans = _by_worth(_spans(actions, size), size)
    best = Decision()
    on_paper = budget
    for _ in range(_CORRECTIONS):
        found = _chosen(on_paper, during, spans)
        if found == best:
            break
        over = max(follow(build(found))) - budget
        if over <= 0 and found.saves > best.saves:
            best = found
        if over == 0:
            break
        on_paper -= over
    return best


_CORRECTIONS = 6
"""How often the formula corrects the choice on paper. Two or three are enough where chunks share nothing."""


class _Span(NamedTuple):
    """What keeping a pair in a way would add to the peak during its forward, between, and during its backward."""

    pair: Pair
    selective: bool
    """Whether layers recompute a part of themselves in this way."""
    is_rest: bool
    """Whether the numbers are what this way adds to the selective one."""
    start: int
    """The place of its forward in the program."""
    end: int
    """The place of its backward."""
    forward: int
    between: int
    backward: int


def _spans(actions: Sequence[Action], size: ActivationBytes) -> Iterator[_Span]:
    """Yields the pairs of a program that could be kept, in the order of their backwards."""
    forwards: dict[Pair, int] = {}
    away = {action[1:3] for action in actions if action.kind is Kind.STORE_INPUT}
    for place, action in enumerate(actions):
        _, chunk, micro_batch, recomputed, _ = action
        if action.kind is Kind.FORWARD:
            forwards[chunk, micro_batch] = place
        ways = size.chunks[chunk] if action.kind is Kind.BACKWARD and recomputed else None
        if ways is None or ways.kept is None:
            continue
        copy, at = size.chunks[chunk - 1].result if chunk else size.inputs, (forwards[chunk, micro_batch], place)
        stored = 0 if (chunk, micro_batch) in away else copy + (size.random_states if size.draws else 0)
        if size.by_layers:
            copy, stored = 0, _left(ways)
        # In its forward, a pair that is recomputed works on a copy of the input that it stores.
        again = ways.forward + (copy if chunk else 0), stored, stored + ways.backward + copy
        whole, part = _taken(ways.kept), None if ways.selective is None else _taken(ways.selective)
        if part is None or part[1] >= whole[1]:
            yield _Span((chunk, micro_batch), False, False, *at, *map(sub, whole, again))
        else:
            yield _Span((chunk, micro_batch), True, False, *at, *map(sub, part, again))
            yield _Span((chunk, micro_batch), False, True, *at, *map(sub, whole, part))


def _taken(kept: ChunkBytes) -> tuple[int, int, int]:
    """Returns what a kept pair takes during its forward, between, and during its backward."""
    return kept.forward, _left(kept), _left(kept) + kept.backward


def _left(kept: ChunkBytes) -> int:
    return kept.saved + (kept.result if kept.keeps_result else 0)


def _by_worth(spans: Iterable[_Span], size: ActivationBytes) -> list[_Span]:
    """Returns the spans by how many bytes they take for how long to save a unit of compute, the least first; at the end
    the rests, which save little of it."""

    def price(span: _Span) -> tuple[bool, float]:
        compute = size.flops[span.pair[0]] if size.flops else span.between
        return span.is_rest, (span.end - span.start) * max(span.between, 0) / max(compute, 1)

    return sorted(spans, key=price)


def _chosen(budget: int, during: Sequence[int], spans: Iterable[_Span]) -> Decision:
    """Returns the pairs that fit one after another, beside what is taken ``during`` each action."""
    peaks, kept = _Peaks(during), dict[Pair, _Span]()
    for span in spans:
        if span.is_rest and span.pair not in kept:
            continue
        peaks.keep(span)
        if peaks.highest <= budget:
            kept[span.pair] = span
        else:
            peaks.keep(span, -1)
    return Decision(frozenset(kept), frozenset(pair for pair, span in kept.items() if span.selective))


class _Peaks:
    """The peak during each action, of which ranges grow and shrink: a tree of maxima."""

    def __init__(self, during: Sequence[int]) -> None:
        self._leaves = 1 << max(0, len(during) - 1).bit_length()
        self._most = [0] * self._leaves + [*during] + [0] * (self._leaves - len(during))
        """Of each node: the peak below it, with what was added to it and below it."""
        self._added = [0] * self._leaves
        """Of each inner node: what was added to all actions below it at once."""
        for node in reversed(range(1, self._leaves)):
            self._most[node] = max(self._most[2 * node], self._most[2 * node + 1])

    @property
    def highest(self) -> int:
        return self._most[1]

    def keep(self, span: _Span, times: int = 1) -> None:
        """Adds what keeping a pair takes, or takes it back if ``times`` is -1."""
        self.add(span.start, span.start + 1, times * span.forward)
        self.add(span.start + 1, span.end, times * span.between)
        self.add(span.end, span.end + 1, times * span.backward)

    def add(self, start: int, end: int, amount: int) -> None:
        """Adds ``amount`` to the actions from ``start`` to before ``end``."""
        if start >= end:
            return
        left, right = start + self._leaves, end + self._leaves
        edges = left, right - 1
        while left < right:
            for node in ([left] if left & 1 else []) + ([right - 1] if right & 1 else []):
                self._most[node] += amount
                if node < self._leaves:
                    self._added[node] += amount
            left, right = (left + 1) >> 1, right >> 1
        for node in edges:
            while node > 1:
                node >>= 1
                self._most[node] = max(self._most[2 * node], self._most[2 * node + 1]) + self._added[node]
