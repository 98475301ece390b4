"""The asynchronous data-parallel collectives of a flat unit, which move no more bytes than they have to on any backend;
and how the recorder of a step learns when something beside compute is launched and ends."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ds_lgamp.partition.memory import in_pool
from ds_lgamp.watch.this_rank import Flight, this_rank

# torch 2.13 renamed these two functions; earlier releases have only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Finish = Callable[[], torch.Tensor]
"""Waits for a collective and returns its result."""


def start_all_gather(full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Launches an all-gather that fills ``full`` [W * n] with the ``shard`` [n] of every rank.

    ``shard`` may be this rank's part of ``full``.
    """
    flight = launched("gather", shard.nbytes * (group.size() - 1))
    work = _all_gather(full, shard, group=group, async_op=True)
    ends_with(work, flight)
    return work


def start_all_reduce(full: torch.Tensor, group: dist.ProcessGroup, in_rank_order: bool = False) -> Finish:
    """Launches the sum of ``full`` [W * n] over the group, in place.

    The all-reduce of a library adds in an order of its own, which depends on where in ``full`` an element lies. With
    ``in_rank_order``, a reduce-scatter starts now and an all-gather follows when the sum is awaited. Both together move
    as many bytes as an all-reduce.
    """
    if in_rank_order:
        part = start_reduce_scatter(full, group, full.dtype, in_rank_order)

        def finish_in_rank_order() -> torch.Tensor:
            # A name keeps the sum until the gather has read it, on libraries that do not.
            own_sum = part()
            start_all_gather(full, own_sum, group).wait()
            return full

        return finish_in_rank_order
    flight = launched("reduce", 2 * full.nbytes * (group.size() - 1) // group.size())
    work = dist.all_reduce(full, group=group, async_op=True)
    ends_with(work, flight)

    def finish() -> torch.Tensor:
        work.wait()
        return full

    return finish


def start_reduce_scatter(
    full: torch.Tensor, group: dist.ProcessGroup, dtype: torch.dtype, in_rank_order: bool = False
) -> Finish:
    """Launches the sum of ``full`` [W * n] over the group. The result is this rank's part [n], in ``dtype``.

    The reduce-scatter of gloo is an all-reduce inside and moves twice the bytes. On gloo an all-to-all and a local sum
    in rank order take its place. With ``in_rank_order`` they do so on every backend.
    """
    ranks = group.size()
    if in_rank_order or dist.get_backend(group) == "gloo":
        received = in_pool(full.device, partial(torch.empty_like, full))
        work = start_all_to_all(received, full, group)
    else:
        # Not from the pool: it stays until the step, and would take the place of a whole chunk there.
        received = full.new_empty(full.numel() // ranks)
        flight = launched("reduce", full.nbytes // ranks * (ranks - 1))
        work = _reduce_scatter(received, full, group=group, async_op=True)
        ends_with(work, flight)

    def finish() -> torch.Tensor:
        work.wait()
        if received.numel() < full.numel():
            return received.to(dtype)
        total = _sum_of(received.view(ranks, -1), torch.empty(full.numel() // ranks, dtype=dtype, device=full.device))
        # A thread of gloo may keep it a little longer.
        received.untyped_storage().resize_(0)
        return total

    return finish


def start_all_to_all(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Launches the part of a reduction that travels: every rank gets its part of W equal ones from each of them."""
    ranks = group.size()
    flight = launched("reduce", sent.nbytes // ranks * (ranks - 1))
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    ends_with(work, flight)
    return work


def sum_in_rank_order(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sums ``tensor`` over the group in place, in rank order, so that every rank gets the same bits."""
    gathered = tensor.new_empty(group.size() * tensor.numel())
    start_all_gather(gathered, tensor, group).wait()
    _sum_of(gathered.view(group.size(), -1), tensor)


def _sum_of(parts: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Fills ``total`` with the sum of ``parts`` and returns it.

    It adds one part after another, since torch's own sum adds in an order that depends on where an element lies.
    """
    total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(part)
    return total


def launched(lane: str, moved: int) -> Flight | None:
    """Records a launch. Returns the flight to end when it is over; None if nobody records."""
    recorder = this_rank.recorder
    return None if recorder is None else recorder.launch(lane, moved)


def ends_with(work: dist.Work, flight: Flight | None) -> None:
    """Lets ``flight`` end with a collective."""
    if flight is None:
        return
    try:
        # On an accelerator, torch calls this in a stream that follows the collective.
        work.get_future().add_done_callback(lambda _: flight.end())
    except RuntimeError:
        # Not every backend has futures. Then the wait for the collective ends the flight.
        return


def followed(function: Callable[[], Any], lane: str) -> Callable[[], Any]:
    """Returns ``function``, which another thread will call. While a step is recorded, the call is recorded too."""
    flight = launched(lane, 0)
    if flight is None:
        return function

    def recorded() -> Any:
        flight.begin()
        try:
            return function()
        finally:
            flight.end()

    return recorded


class PeerSlices:
    """The slices of a kept part, of which ranks of several nodes update one each and then gather the others'.

    Args:
        shard: this rank's slice of ``kept``.
        peers: the ranks that have the same kept part; None if the shard is all of it.
    """

    def __init__(self, kept: torch.Tensor, shard: torch.Tensor, peers: dist.ProcessGroup | None) -> None:
        self._kept, self._shard, self._peers = kept, shard, peers
        self.are_old = False
        """Whether peers have changed their slices since this rank gathered them."""
        self._gathering: dist.Work | None = None

    def start(self) -> None:
        """Launches the gather of the slices that peers changed. All data-parallel ranks call it together, after the
        updates of their shards."""
        if self.are_old and self._peers is not None:
            self.are_old = False
            self._gathering = start_all_gather(self._kept, self._shard, self._peers)

    def finish(self) -> None:
        """Waits for the gather, if it is in flight."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
