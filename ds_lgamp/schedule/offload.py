"""Offloading: what lies in the memory of the host while the device does not need it, and when it travels.

The host holds the optimizer's state and master weights, and updates them. Every chunk's gradient is stored once per
step, and its weights are loaded once after every update. If the host holds the parameters too, each gather of a chunk
takes a load of its own.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

DISK_BLOCK = 4096
"""The disk moves multiples of so many bytes."""
PIECE = 8 << 20
"""Bytes of a piece of a tensor that moves on its own."""
PIECES = 4
"""How many pieces move at once, and how many of each direction of the bus have a buffer."""
UPDATE_BUFFERS = 2
"""Units in memory: one that is updated, and one that is written and then read for the next update."""


class Offload(NamedTuple):
    """What the host holds beside optimizer state and master weights."""

    parameters: bool = False
    """Whether it holds this rank's shards of the parameters (stage 3). Each gather then begins with a load."""
    on_device: tuple[int, ...] = ()
    """Chunks of which the host holds nothing (stage 3). STEP updates them on the device, and also what several chunks
    share, because copies on other ranks must be updated alike."""


def lowest_chunks(placement: Sequence[int], share: float) -> tuple[int, ...]:
    """Returns the lowest chunks of every rank that stay on the device if the host is to hold at least the ``share``,
    from 0 to 1, of each rank's chunks.

    A step begins with the lowest chunks. Their updates on the host would be the only ones that nothing hides.
    """
    own = [[chunk for chunk, rank in enumerate(placement) if rank == each] for each in range(max(placement) + 1)]
    return tuple(sorted(chunk for chunks in own for chunk in chunks[: len(chunks) - math.ceil(share * len(chunks))]))
