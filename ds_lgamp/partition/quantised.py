"""Weights and gradients travel as small whole numbers in blocks, each with a scale: ``zero_quantized_weights`` and
``zero_quantized_gradients`` of DeepSpeed (ZeRO++, arXiv 2306.10209).

A block is as many elements as parameters are aligned to. So it lies in one parameter and in one shard, wherever chunks
and shards are cut: the layout does not change what is rounded together. Its scale, in bf16, is the largest magnitude
divided by the largest whole number. An element becomes the nearest whole number of scales. Numbers and scales of a part
travel together, in one collective. A block with a number that is not finite arrives as NaN.

Nothing here waits for the device.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from ds_lgamp.cost.units import aligned, packed_bytes
from ds_lgamp.partition.collectives import Finish, start_all_gather, start_all_to_all
from ds_lgamp.partition.memory import in_pool

_LARGEST = {8: 127, 4: 7}
"""By bits. The other end of the range would round asymmetrically."""
_BLOCK = aligned(1)
_SCALE = torch.bfloat16
_TINY = torch.finfo(_SCALE).tiny
"""The least scale, so that nothing is divided by zero."""
_PIECES = 8
"""Parts are rounded in at most so many pieces. Each takes temporary memory in fp32, and kernels of its own."""


def pack(values: torch.Tensor, bits: int, packed: torch.Tensor) -> None:
    """Rounds ``values`` [parts, n] and fills ``packed`` [parts, packed_bytes(n)], of bytes: numbers first, then
    scales. n is a multiple of the block."""
    for some, of_some in zip(*map(_pieces, (values, packed))):
        _pack(some, bits, of_some)


def unpack(packed: torch.Tensor, bits: int, values: torch.Tensor) -> None:
    """Fills ``values`` [parts, n] with what :func:`pack` made of others, in the dtype of ``values``."""
    for of_some, some in zip(*map(_pieces, (packed, values))):
        _unpack(of_some, bits, some)


def _pieces(parts: torch.Tensor) -> Sequence[torch.Tensor]:
    return parts.split(-(-len(parts) // _PIECES))


def _pack(values: torch.Tensor, bits: int, packed: torch.Tensor) -> None:
    parts, elements = values.shape
    blocks = values.reshape(-1, _BLOCK).float()
    largest = blocks.abs().amax(1, keepdim=True)
    scales = largest.div_(_LARGEST[bits]).clamp_min_(_TINY).to(_SCALE)
    numbers = (blocks * scales.float().reciprocal_()).round_().to(torch.int8).view(parts, elements)
    if bits == 4:
        # Two to a byte: the first half of a part in the low bits, the second half in the high ones.
        low, high = numbers.view(torch.uint8).chunk(2, 1)
        numbers = (low & 15) | (high << 4)
    end = elements * bits // 8
    packed[:, :end] = numbers.view(torch.uint8)
    packed[:, end:] = scales.view(parts, -1).view(torch.uint8)


def _unpack(packed: torch.Tensor, bits: int, values: torch.Tensor) -> None:
    parts, elements = values.shape
    end = elements * bits // 8
    scales = packed[:, end:].contiguous().view(_SCALE).view(-1, 1)
    numbers = packed[:, :end].view(torch.int8)
    if bits == 4:
        # Shifts of signed numbers keep the sign.
        numbers = torch.cat([numbers << 4 >> 4, numbers >> 4], 1)
    exact = values.dtype in (torch.float32, torch.float64)
    rounded = values if exact else torch.empty_like(values, dtype=torch.float32)
    rounded.copy_(numbers)
    # In fp32, since a whole number times a scale has more digits than half precision has.
    rounded.view(-1, _BLOCK).mul_(scales)
    if not exact:
        values.copy_(rounded)


class RoundedGather:
    """An all-gather under way that fills ``full`` [W * n] with the rounded ``shard`` [n] of every rank, this rank's
    too: all ranks get the same values."""

    def __init__(self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, bits: int) -> None:
        self._full, self._bits = full, bits
        # Both live as long as the gather may read and fill them.
        self._own = shard.new_empty(1, packed_bytes(shard.numel(), bits), dtype=torch.uint8)
        pack(shard.view(1, -1), bits, self._own)
        self._packed = in_pool(full.device, partial(self._own.new_empty, group.size(), self._own.numel()))
        self._work = start_all_gather(self._packed.view(-1), self._own.view(-1), group)

    def wait(self) -> None:
        """Fills ``full``, in the device's current stream. Called again, perhaps in another stream, it does so again."""
        self._work.wait()
        unpack(self._packed, self._bits, self._full.view(len(self._packed), -1))


def start_rounded_sum(full: torch.Tensor, group: dist.ProcessGroup, dtype: torch.dtype, bits: int) -> Finish:
    """Launches the sum over the group of ``full`` [W * n], rounded once on every rank. The result is this rank's part
    [n] in ``dtype``, which adds the ranks' parts in their order. ``full`` may be freed at once."""
    ranks = group.size()
    elements = full.numel() // ranks
    make = partial(full.new_empty, ranks, packed_bytes(elements, bits), dtype=torch.uint8)
    sent, received = in_pool(full.device, make), in_pool(full.device, make)
    pack(full.view(ranks, elements), bits, sent)
    work = start_all_to_all(received, sent, group)

    def finish() -> torch.Tensor:
        work.wait()
        total = torch.empty(1, elements, dtype=dtype, device=received.device)
        unpack(received[:1], bits, total)
        part = torch.empty_like(total) if ranks > 1 else total
        for other in received[1:].split(1):
            unpack(other, bits, part)
            total.add_(part)
        # Threads of gloo may keep both a little longer.
        for tensor in (sent, received):
            tensor.untyped_storage().resize_(0)
        return total.view(-1)

    return finish
