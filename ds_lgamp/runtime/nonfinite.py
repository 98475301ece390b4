"""Where the first number of a batch that is not finite came from.

Every rank records on its device which results are not finite, so that the host reads nothing while a batch runs. A sum
over a tensor is finite if all of its elements are. After a batch that is not finite, the ranks put together what they
have seen.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from ds_lgamp.runtime.batch import LoadMicroBatch
from ds_lgamp.runtime.logits import Logits

INPUTS, LABELS = -2, -1
"""The places of a micro-batch's inputs and labels, lower than the places of the layers."""


class FirstSeen:
    """Records sums of the inputs, the labels, every layer's result, and the gradient of every layer's result, by
    micro-batch.

    Args:
        layers: the layers of this rank, by their number in the model.
        device: where the layers compute.
    """

    def __init__(self, layers: Sequence[int], device: torch.device) -> None:
        self._rows = {place: row for row, place in enumerate((INPUTS, LABELS, *layers))}
        self._device = device
        self._sums: torch.Tensor | None = None
        """Sums [2, places, micro-batches]: forward, then backward. None between training batches."""
        self._recorded: set[tuple[int, int]] = set()
        """Layers and micro-batches whose forward was recorded: recomputation repeats it."""

    def begin(self, micro_batches: int, load: LoadMicroBatch) -> LoadMicroBatch:
        """Begins a training batch. Returns a ``load`` that also records what it returns."""
        self._sums = torch.zeros(2, len(self._rows), micro_batches, device=self._device)
        self._recorded.clear()

        def recording(micro_batch: int) -> tuple[Any, Any]:
            loaded = load(micro_batch)
            for place, value in zip((INPUTS, LABELS), loaded):
                self.after_layer(place, micro_batch, value)
            return loaded

        return recording

    def after_layer(self, layer: int, micro_batch: int, result: Any) -> None:
        """Records what ``layer`` has computed for ``micro_batch`` and, once it is known, the gradient of that."""
        if self._sums is None or (layer, micro_batch) in self._recorded:
            return
        if micro_batch >= self._sums.shape[2]:
            # The script gives the step more micro-batches than it said. The norm still tells whether they are finite.
            return
        self._recorded.add((layer, micro_batch))
        forward, backward = self._sums[:, self._rows[layer], micro_batch]
        members = [result] if isinstance(result, torch.Tensor) else tree_leaves(result)
        hidden = not torch.is_grad_enabled()
        for member in members:
            # The loss tells of logits that are not computed.
            if isinstance(member, torch.Tensor) and member.is_floating_point() and not isinstance(member, Logits):
                # In chunks that go forward only nothing requires gradients, and hidden states come first.
                _record(forward, member, infinity_counts=member.requires_grad or hidden)
                hidden = False
                # A hook on a leaf, which is a parameter, would outlive the batch.
                if member.grad_fn is not None:
                    member.register_hook(partial(_record, backward))

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Records nothing inside the block, in which the script evaluates between two calls of a batch."""
        sums, self._sums = self._sums, None
        try:
            yield
        finally:
            self._sums = sums

    def end(self) -> torch.Tensor:
        """Ends the batch. Returns its sums [2, places, micro-batches], in the order of :attr:`places`."""
        assert self._sums is not None, "a training batch ends after its begin"
        sums, self._sums = self._sums, None
        return sums

    @property
    def places(self) -> list[int]:
        return list(self._rows)


@torch.no_grad()
def _record(total: torch.Tensor, tensor: torch.Tensor, infinity_counts: bool = True) -> None:
    """Adds the sum of ``tensor`` to ``total``. Where infinity does not count, only NaN does: in masks it is usual."""
    # In fp32, because sums of fp16 numbers leave its range soon.
    found = tensor.sum(dtype=torch.float32)
    total.add_(found if infinity_counts else found.nan_to_num(nan=torch.nan, posinf=0.0, neginf=0.0))


class Seen(NamedTuple):
    """What one rank has seen of a batch that is not finite."""

    rank: int
    data_rank: int
    """Its data-parallel rank."""
    losses: list[int]
    """Micro-batches whose loss is not finite."""
    forward: list[tuple[int, int]]
    """(micro-batch, place) of results that are not finite. Places are layers, INPUTS and LABELS."""
    backward: list[tuple[int, int]]
    """(micro-batch, place) of results whose gradient is not finite."""
    gradients: list[str]
    """Names of parameters whose gradient over all micro-batches is not finite, as far as this rank has it."""
    weights: list[str]
    """Names of parameters with weights that are not finite."""


class Origin(NamedTuple):
    """Where the first number that is not finite came from."""

    kind: str
    """inputs, labels, forward, loss, backward (of a layer), loss backward, gradient (of a parameter), or norm."""
    rank: int
    """The rank that has seen it."""
    data_rank: int = 0
    micro_batch: int | None = None
    layer: int | None = None
    parameter: str | None = None
    """The parameter whose weights, in a forward, or whose gradient is not finite."""


def find_origin(ranks: Sequence[Seen], layers: int) -> Origin:
    """Returns the origin of the number that made the loss or the norm of the gradient not finite.

    A forward is at fault if it made a loss not finite: of the first such micro-batch, the lowest place. Results that
    left the loss finite, such as scores that a mask hides, are left out. Otherwise a backward is: of the first
    micro-batch, the highest layer whose result got a finite gradient and whose input did not. A backward may also spoil
    the gradients of parameters alone.

    Args:
        layers: the number of layers of the model.
    """
    losses = [(micro_batch, seen.data_rank) for seen in ranks for micro_batch in seen.losses]
    if losses:
        return _in_forward(ranks, *min(losses))
    backward = [(micro_batch, seen.data_rank) for seen in ranks for micro_batch, _ in seen.backward]
    if backward:
        return _in_backward(ranks, *min(backward), layers)
    for seen in ranks:
        if seen.gradients:
            return Origin("gradient", seen.rank, parameter=seen.gradients[0], layer=layer_of(seen.gradients[0]))
    return Origin("norm", ranks[0].rank)


def _in_forward(ranks: Sequence[Seen], micro_batch: int, data_rank: int) -> Origin:
    found = [
        (place, seen.rank)
        for seen in ranks
        if seen.data_rank == data_rank
        for number, place in seen.forward
        if number == micro_batch and place != LABELS
    ]
    if found:
        place, rank = min(found)
        if place == INPUTS:
            return Origin("inputs", rank, data_rank, micro_batch)
        return Origin("forward", rank, data_rank, micro_batch, place, _of_layer(ranks, "weights", place))
    (loser,) = [seen for seen in ranks if seen.data_rank == data_rank and micro_batch in seen.losses][:1]
    kind = "labels" if (micro_batch, LABELS) in loser.forward else "loss"
    return Origin(kind, loser.rank, data_rank, micro_batch)


def _in_backward(ranks: Sequence[Seen], micro_batch: int, data_rank: int, layers: int) -> Origin:
    place, seen_by = max(
        (place, seen.rank)
        for seen in ranks
        if seen.data_rank == data_rank
        for number, place in seen.backward
        if number == micro_batch
    )
    if place == layers - 1:
        return Origin("loss backward", seen_by, data_rank, micro_batch)
    layer = place + 1
    return Origin("backward", seen_by, data_rank, micro_batch, layer, _of_layer(ranks, "gradients", layer))


def _of_layer(ranks: Sequence[Seen], kind: str, layer: int) -> str | None:
    """Returns the first parameter of ``layer`` among the ranks' ``kind``; None if there is none."""
    return next((name for seen in ranks for name in getattr(seen, kind) if layer_of(name) == layer), None)


def layer_of(parameter: str) -> int | None:
    """Returns the layer of a parameter by its global name; None for one of a tied module."""
    first = parameter.partition(".")[0]
    return int(first) if first.isdigit() else None
