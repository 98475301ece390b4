"""The temporary memory of a step of Muon, which follows ``ds_lgamp/optimizers/muon.py``.

With n elements of a matrix, s of the square of its shorter side, and all matrices of a pipeline rank together:

1. Directions: a tensor per shard, in fp32 until it has the type in which the iteration begins.
2. There: what leaves and what arrives by the all-to-all, then the matrices of this rank put together.
3. The iteration, one matrix after another: 2n + 2s elements (standard), or the larger of 2n + 3s and n + 5s (gram).
4. Back: the results of this rank, what leaves, and what arrives.

Directions stay until the step ends. Where every rank has whole matrices, nothing travels there, and one all-gather
brings the results.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ds_lgamp.cost.ledger import Ledger
from ds_lgamp.cost.matrices import Matrix, elements_by_rank, spread
from ds_lgamp.cost.storage import aligned, part_size

_DIRECTION_BYTES = 4
_KIND = "update"


class Iteration(NamedTuple):
    """What a step makes of its matrices."""

    method: str = "gram"
    """As in ``NewtonSchulz``."""
    steps: int = 5
    nesterov: bool = True
    leaving: int = 4
    """Bytes per element of what is made orthogonal."""
    returning: int = 4
    """Bytes per element of the result."""

    def peak(self, matrix: Matrix) -> int:
        """Returns the bytes that making ``matrix`` orthogonal takes beside it, its result included."""
        block = matrix.numel // matrix.blocks
        short = min(matrix.rows // matrix.blocks, matrix.columns)
        of_block = self._peak_of_block(block, short**2)
        made = self.returning * matrix.numel
        # The results of the blocks wait for the last one, and are joined.
        return max(made - self.returning * block + of_block, 2 * made)

    def _peak_of_block(self, elements: int, square: int) -> int:
        if self.method == "standard" or self.steps == 1:
            return self.returning * (2 * elements + 2 * square)
        powers = 5 if self.steps > 4 else 4
        most = self.returning * max(2 * elements + 3 * square, elements + powers * square)
        # The matrix is divided by its norm before it is rounded.
        rounded = self.returning if self.returning != self.leaving else 0
        return max(most, (self.leaving + rounded) * elements)


def step_memory(units: Sequence[Sequence[Matrix]], zero_stage: int, data_ranks: int, iteration: Iteration) -> int:
    """Returns the bytes that a step of Muon takes for a moment, on the data-parallel rank that takes most. AdamW's step
    on all other tensors is not among them.

    Args:
        units: the matrices of every unit, in the order of storage, which begins with them.
    """
    matrices = [matrix for unit in units for matrix in unit]
    owners = spread([matrix.work for matrix in matrices], data_ranks)
    return max(_on_rank(rank, units, owners, zero_stage, data_ranks, iteration) for rank in range(data_ranks))


def _on_rank(
    rank: int,
    units: Sequence[Sequence[Matrix]],
    owners: Sequence[int],
    zero_stage: int,
    data_ranks: int,
    iteration: Iteration,
) -> int:
    ledger, partitioned = Ledger(), zero_stage > 0 and data_ranks > 1
    matrices = [matrix for unit in units for matrix in unit]
    own = [matrix for matrix, owner in zip(matrices, owners) if owner == rank]
    held = sum(matrix.held(data_ranks)[rank] for matrix in matrices)
    owned = sum(matrix.numel for matrix in own)
    for unit in units:
        _take_directions(ledger, sum(_in_shard(matrix, rank, data_ranks, partitioned) for matrix in unit), iteration)
    if partitioned:
        ledger.take(_KIND, iteration.leaving * (held + owned))
        ledger.free(_KIND, iteration.leaving * held)
        ledger.take(_KIND, iteration.leaving * owned)
        ledger.free(_KIND, iteration.leaving * owned)
    for matrix in own:
        ledger.pass_by(_KIND, iteration.peak(matrix))
        ledger.take(_KIND, iteration.returning * matrix.numel)
        if partitioned:
            ledger.free(_KIND, iteration.leaving * matrix.numel)
    if partitioned:
        ledger.take(_KIND, iteration.returning * (owned + held))
    elif data_ranks > 1:
        by_rank = [0] * data_ranks
        for matrix, owner in zip(matrices, owners):
            by_rank[owner] += matrix.numel
        ledger.take(_KIND, iteration.returning * max(by_rank) * data_ranks)
    return ledger.most[_KIND]


def _take_directions(ledger: Ledger, elements: int, iteration: Iteration) -> None:
    """Takes the directions of a unit. Without nesterov, momentum itself is the direction."""
    mixed = _DIRECTION_BYTES * elements if iteration.nesterov else 0
    ledger.take(_KIND, mixed)
    if iteration.leaving != _DIRECTION_BYTES:
        ledger.take(_KIND, iteration.leaving * elements)
        ledger.free(_KIND, mixed)


def _in_shard(matrix: Matrix, rank: int, data_ranks: int, partitioned: bool) -> int:
    """Returns the elements of a rank's shard that belong to ``matrix`` or to the gap behind it."""
    with_gap = aligned(matrix.numel)
    if not partitioned:
        return with_gap
    return elements_by_rank(matrix.start, with_gap, part_size(matrix.storage, data_ranks), data_ranks)[rank]
