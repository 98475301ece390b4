"""The layout of a unit's parameters in its flat storage.

Every parameter begins at a multiple of 32 elements, and every rank's part of the storage ends at one. The gaps hold
zeros. An element then has the same place in the vectors a kernel works with, wherever parts are cut. This keeps
rounding the same: a CPU with 512-bit vectors takes two vectors of 16 fp32 at once and the remaining elements one by
one, which may round differently.

A matrix also begins at a multiple of 64 bytes, which MKL asks for where results must be reproducible (Intel, "Getting
Started with Conditional Numerical Reproducibility"). GPU kernels load 16 bytes at once.
"""

from collections.abc import Iterable

ALIGNMENT = 32
"""In elements."""


def aligned(elements: int) -> int:
    """Rounds ``elements`` up to a multiple of the alignment."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def offsets(sizes: Iterable[int]) -> list[int]:
    """Returns where each parameter begins, and where the padding of the last one ends, in elements.

    Args:
        sizes: elements of each parameter, in storage order.
    """
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + aligned(size))
    return starts


def part_size(end: int, ranks: int) -> int:
    """Returns the elements of one part if ``ranks`` equal parts hold a storage of ``end`` elements."""
    return aligned(-(-end // ranks))
