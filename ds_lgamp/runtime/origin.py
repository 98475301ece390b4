"""Decides where the first number of a batch that is not finite came from, by what the ranks have seen."""

from collections.abc import Sequence
from typing import NamedTuple

from ds_lgamp.runtime.first_seen import INPUTS, LABELS


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
    left the loss finite, such as scores behind a mask, are left out. Otherwise a backward is: of the first micro-batch,
    the highest layer whose result got a finite gradient and whose input did not. A backward may also spoil the
    gradients of parameters alone.

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
