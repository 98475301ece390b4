"""The base of these optimizers: knows which part of each tensor lies in the shards that it updates."""

from collections.abc import Iterable, Iterator
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

from ds_lgamp.partition.parts import Part, parts_of
from ds_lgamp.partition.policy import ZeroPolicy
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
        """From now on updates the tensors of ``partition``, whose segments its groups hold."""
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
