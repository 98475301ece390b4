"""What optimizers of whole tensors share: they know which part of each tensor lies in this rank's shards, bring whole
tensors to the rank that works on them, and bring the results to the ranks that need them."""

from collections.abc import Iterable, Iterator, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import Parameter

from ds_lgamp.partition.collectives import start_all_gather
from ds_lgamp.partition.policy import ZeroPolicy
from ds_lgamp.partition.unit import Part, parts_of
from ds_lgamp.partition.zero_partition import ZeroPartition


class Piece(NamedTuple):
    """The part of a tensor that lies in this rank's shard; it may be empty."""

    part: Part
    group: int
    """The tensor's parameter group."""
    shard: Parameter | None
    """The optimizer's parameter that holds the piece; None if the piece is empty."""
    within: slice
    """Where the piece lies in ``shard``, and in its gradient and state."""

    @property
    def is_sliced(self) -> bool:
        """Whether each tensor-parallel rank has a slice of the tensor."""
        return self.part.shape != self.part.whole_shape


class TensorOptimizer(torch.optim.Optimizer):
    """A torch optimizer on shards that knows the tensors they are cut from.

    :meth:`bind` gives it the tensors. Its groups always stay the same dictionaries, because schedulers may hold them.
    """

    pieces: list[Piece] | None = None
    """The pieces of all tensors that it updates, in an order that all data-parallel and tensor-parallel ranks share."""

    def bind(self, partition: ZeroPartition) -> None:
        """Sets the tensors to update: those of ``partition``, whose segments its groups hold."""
        self.pieces = sorted(_pieces_of(partition), key=lambda piece: piece.group)

    @property
    def policy(self) -> ZeroPolicy:
        """How the tensors are spread over ranks; needs a tensor."""
        assert self.pieces, "a rank has tensors to update"
        return self.pieces[0].part.unit.policy

    def bound_pieces(self) -> list[Piece]:
        """Returns the pieces. Raises RuntimeError before :meth:`bind`."""
        if self.pieces is None:
            raise RuntimeError(
                f"ds_lgamp's {type(self).__name__} steps inside an engine only; pass it to deepspeed.initialize"
            )
        return self.pieces

    def shards(self) -> Iterator[tuple[dict[str, Any], Parameter, torch.Tensor]]:
        """Yields the parameters of all groups that have a gradient: group, parameter and gradient."""
        for group in self.param_groups:
            for shard in group["params"]:
                if shard.grad is not None:
                    yield group, shard, shard.grad

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = self.param_groups
        super().load_state_dict(state_dict)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)
        self.param_groups = groups


def check_numbers(group: dict[str, Any], names: Iterable[str]) -> None:
    """Raises ValueError if an option of ``group`` among ``names`` is no number from 0 on."""
    for name in names:
        value = group[name]
        if isinstance(value, torch.Tensor):
            continue
        if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= float(value) < float("inf"):
            raise ValueError(f"{name} is {value!r}; use a number from 0")


def _pieces_of(partition: ZeroPartition) -> Iterator[Piece]:
    for unit in partition.units:
        for part in parts_of(unit):
            if part.group is None:
                continue
            segment, within = part.segment, slice(0, 0)
            if segment is not None:
                within = slice(part.in_shard.start - segment.start, part.in_shard.stop - segment.start)
            yield Piece(part, part.group, None if segment is None else segment.shard, within)


class Exchange:
    """Moves tensors of which every rank holds a part. Each way takes one all-to-all, and moves each element once.

    Args:
        sizes: elements of every tensor's part on every rank.
        owners: the rank that works on every tensor.
        group: the ranks.
        order: the ranks in the order of their parts; by default their own order.
    """

    def __init__(
        self,
        sizes: Sequence[Sequence[int]],
        owners: Sequence[int],
        group: dist.ProcessGroup,
        order: Sequence[int] | None = None,
    ) -> None:
        rank, self._ranks, self._group, self._sizes = group.rank(), range(group.size()), group, sizes
        self._order = self._ranks if order is None else order
        self.own = [index for index, owner in enumerate(owners) if owner == rank]
        """The tensors that this rank works on."""
        # Parts leave in the order of the ranks they go to.
        self._leaving = sorted(range(len(owners)), key=lambda index: owners[index])
        self._parts = [sizes[index][rank] for index in self._leaving]
        self._held = [0] * group.size()
        for index, owner in enumerate(owners):
            self._held[owner] += sizes[index][rank]
        self._owned = [sum(sizes[index][other] for index in self.own) for other in self._ranks]

    def collect(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the flat tensors of :attr:`own`, from the flat part of every tensor. All ranks call it together."""
        received = self._exchange(torch.cat([parts[index] for index in self._leaving]), self._held, self._owned)
        arrived = received.split([self._sizes[index][rank] for rank in self._ranks for index in self.own])
        count = len(self.own)
        return [torch.cat([arrived[rank * count + number] for rank in self._order]) for number in range(count)]

    def distribute(
        self, results: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> list[torch.Tensor]:
        """Returns this rank's flat part of the result for every tensor, from the flat results for :attr:`own`, which
        have ``dtype``."""
        by_rank: list[list[torch.Tensor]] = [[] for _ in self._ranks]
        for index, result in zip(self.own, results):
            for rank, part in zip(self._order, result.split([self._sizes[index][rank] for rank in self._order])):
                by_rank[rank].append(part)
        leaving = [part for parts in by_rank for part in parts]
        sent = torch.cat(leaving) if leaving else torch.empty(0, dtype=dtype, device=device)
        arrived = self._exchange(sent, self._owned, self._held).split(self._parts)
        parts = dict(zip(self._leaving, arrived))
        return [parts[index] for index in range(len(parts))]

    def _exchange(self, sent: torch.Tensor, leaving: list[int], arriving: list[int]) -> torch.Tensor:
        received = sent.new_empty(sum(arriving))
        dist.all_to_all_single(received, sent, arriving, leaving, group=self._group)
        return received


class Sharing:
    """Has the interface of :class:`Exchange` where every rank holds the whole tensors. Only results travel, in one
    all-gather of as many elements per rank as the rank with most has."""

    def __init__(self, sizes: Sequence[int], owners: Sequence[int], group: dist.ProcessGroup) -> None:
        self.own = [index for index, owner in enumerate(owners) if owner == group.rank()]
        self._sizes, self._group = sizes, group
        # Results lie together, first those of rank 0.
        self._order = sorted(range(len(owners)), key=lambda index: owners[index])
        by_rank = [[sizes[index] for index in self._order if owners[index] == rank] for rank in range(group.size())]
        self._longest = max(map(sum, by_rank))
        self._cuts = [[*of_rank, self._longest - sum(of_rank)] for of_rank in by_rank]

    def collect(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [parts[index] for index in self.own]

    def distribute(
        self, results: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> list[torch.Tensor]:
        if self._group.size() == 1:
            return list(results)
        everything = torch.empty(self._longest * self._group.size(), dtype=dtype, device=device)
        rows = everything.view(self._group.size(), -1)
        mine = rows[self._group.rank()]
        if results:
            torch.cat(list(results), out=mine[: sum(map(torch.numel, results))])
        start_all_gather(everything, mine, self._group).wait()
        arrived = [part for row, cuts in zip(rows, self._cuts) for part in row.split(cuts)[:-1]]
        parts = dict(zip(self._order, arrived))
        return [parts[index] for index in range(len(parts))]
