"""Which rank makes which matrix orthogonal, and which elements of each matrix the data-parallel ranks hold."""

from collections.abc import Sequence
from typing import NamedTuple

from ds_lgamp.cost.storage import part_size


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
