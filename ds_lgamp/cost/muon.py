"""Which rank makes which matrix orthogonal, and the temporary memory of a step of Muon, which follows
``ds_lgamp/optimizers/muon.py``.

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

from ds_lgamp.cost.state import Ledger
from ds_lgamp.cost.units import aligned, part_size


class Matrix(NamedTuple):
    """A matrix in the flat storage of its unit."""

    rows: int
    columns: int
    start: int
    """Where it begins in the storage, in elements."""
    storage: int
    """Elements of the storage, with the padding of its last parameter."""
    blocks: int = 1
    """How many matrices it stacks along its rows. Each is made orthogonal by itself."""

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def work(self) -> int:
        """Floating-point operations of a Newton-Schulz step on all blocks."""
        return self.blocks * newton_schulz_work(self.rows // self.blocks, self.columns)

    def held(self, data_ranks: int) -> list[int]:
        """Returns how many of its elements lie on each data-parallel rank, if these have equal parts of the storage."""
        return elements_by_rank(self.start, self.numel, part_size(self.storage, data_ranks), data_ranks)


def newton_schulz_work(rows: int, columns: int) -> int:
    """Returns the floating-point operations of one Newton-Schulz step on a matrix: X X^T, its square, and the product
    with X, where X has no more rows than columns."""
    short, long = sorted((rows, columns))
    return 2 * short * short * (2 * long + short)


def spread(work: Sequence[int], ranks: int) -> list[int]:
    """Returns a rank for every item, so that the ranks have about the same work.

    The largest item goes to the rank that has least, then the next one. So no rank has more than the average and one
    item beyond it. (R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17(2), 1969.) Ties
    go to the first item and the first rank.
    """
    load = [0] * ranks
    owners = [0] * len(work)
    for item in sorted(range(len(work)), key=lambda item: -work[item]):
        owner = min(range(ranks), key=lambda rank: load[rank])
        owners[item] = owner
        load[owner] += work[item]
    return owners


def elements_by_rank(start: int, numel: int, part: int, ranks: int) -> list[int]:
    """Returns how many of ``numel`` consecutive elements, from ``start`` on, lie in each of ``ranks`` parts of ``part``
    elements."""
    bounds = [(rank * part, (rank + 1) * part) for rank in range(ranks)]
    return [max(0, min(start + numel, end) - max(start, begin)) for begin, end in bounds]


def exchange_bytes(
    matrices: Sequence[Matrix], zero_stage: int, data_ranks: int, leaving: int = 2, returning: int = 2
) -> list[int]:
    """Returns the bytes that each data-parallel rank sends in a step of Muon, counted as ``CollectiveCounter`` counts
    them.

    At stages 1 to 3, a matrix goes from the ranks that hold it to its owner, and the result comes back. At stage 0, an
    all-gather brings the results, with as many elements from each rank as the owner of most has.

    Args:
        matrices: in the order of their parameter groups, of units, and in those of storage.
        leaving: bytes per element of what is made orthogonal.
        returning: bytes per element of the result.
    """
    owners = spread([matrix.work for matrix in matrices], data_ranks)
    if zero_stage == 0:
        owned = [0] * data_ranks
        for matrix, owner in zip(matrices, owners):
            owned[owner] += matrix.numel
        return [returning * max(owned) * (data_ranks - 1)] * data_ranks
    sent = [0] * data_ranks
    for matrix, owner in zip(matrices, owners):
        held = matrix.held(data_ranks)
        for rank in range(data_ranks):
            if rank != owner:
                sent[rank] += leaving * held[rank]
                sent[owner] += returning * held[rank]
    return sent


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
    """Returns the elements of a rank's shard that belong to ``matrix`` or to the gap after it."""
    with_gap = aligned(matrix.numel)
    if not partitioned:
        return with_gap
    return elements_by_rank(matrix.start, with_gap, part_size(matrix.storage, data_ranks), data_ranks)[rank]
