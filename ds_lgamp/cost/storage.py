"""Where the parameters of a unit lie in its flat storage.

Every parameter begins at a multiple of 32 elements, and every rank's part of the storage ends at one; what lies between
is zero. So an element has the same place in the vectors a kernel works with wherever parts are cut: a CPU of 512 bits
takes two vectors of 16 fp32 at once and what is left over one by one, which may round differently. A matrix begins at
64 bytes, which MKL asks for where results are to be the same (Intel, "Getting Started with Conditional Numerical
Reproducibility"), and kernels of GPUs load 16 bytes at once.
"""

from collections.abc import Iterable

ALIGNMENT = 32
"""In elements."""


def aligned(elements: int) -> int:
    """``elements`` and what follows them up to the next multiple of the alignment."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def offsets(sizes: Iterable[int]) -> list[int]:
    """Where parameters of so many elements begin, one after another, and where the last one's padding ends."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + aligned(size))
    return starts


def part_size(end: int, ranks: int) -> int:
    """Elements of each of the equal parts, one for every data-parallel rank, that hold a storage up to ``end``."""
    return aligned(-(-end // ranks))
