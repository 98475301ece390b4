"""The norm of the gradient over all ranks."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

_ROW = 4096
"""Number of elements whose squares :func:`global_norm` adds up in fp32."""
_BITS, _CUTS = 22, 3
"""Bits of a cut, and cuts of a square.

:func:`exact_norm` counts 66 bits of every square, from the first bit of the greatest square down, in three cuts of 22
bits. An int64 holds the sum of 2^41 numbers of 22 bits. The bits left out of that many squares add up to less than
2^-25 of the greatest square.
"""
_CPU_BLOCK, _BLOCK = 1 << 16, 1 << 24
"""Number of elements in a block, on a CPU and on other devices.

On a CPU the fp64 copy of a block stays in the cache. Elsewhere blocks are larger, since every call costs time, but
small enough that the copy takes little memory.
"""


def global_norm(
    gradients: Sequence[torch.Tensor], group: dist.ProcessGroup | None, device: torch.device
) -> torch.Tensor:
    """Returns the 2-norm of the gradient over all ranks, in fp64. The norms of its rows are rounded to fp32.

    Nothing is copied to the host, and no gradient is converted: torch's norm with an fp64 result would copy the
    gradient. The norm is infinite if the sum of the squares of a row exceeds fp32, as with elements of 3e17.

    Args:
        gradients: the gradients of this rank, flat.
        group: all ranks; None if this rank is alone.
        device: where the norm is computed.
    """
    norms = [norm for gradient in gradients for norm in _norms(gradient)]
    total = torch.cat(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)
    if group is not None and group.size() > 1:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def clip_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """Returns the factor that brings gradients of this ``norm`` down to at most ``limit``, as clip_grad_norm_ does."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def exact_norm(
    gradients: Sequence[torch.Tensor], group: dist.ProcessGroup | None, device: torch.device
) -> torch.Tensor:
    """Returns the 2-norm of the gradient over all ranks, in fp64. It is the same to the bit however the gradient is cut
    and spread over ranks.

    The square of an fp32 number is exact in fp64. Each square is cut into whole numbers of a few fixed units, and whole
    numbers add up without rounding. The greatest gradient decides the largest unit. After J. Demmel and H. D. Nguyen,
    "Parallel Reproducible Summation", IEEE Transactions on Computers 64(7), 2015, with integers for their bins.

    Returns NaN if any gradient is inf or NaN.

    Args:
        gradients: the gradients of this rank, in fp32 or a smaller dtype.
        group: all ranks; None if this rank is alone.
        device: where the norm is computed.
    """
    alone = group is None or group.size() == 1
    greatest = torch.zeros((), dtype=torch.float64, device=device)
    for block in _blocks(gradients):
        # NaN does not survive a maximum over ranks.
        greatest = torch.maximum(greatest, block.abs().max().double().nan_to_num(nan=torch.inf, posinf=torch.inf))
    if not alone:
        dist.all_reduce(greatest, dist.ReduceOp.MAX, group)
    # Without gradients, or with infinite ones, the result does not depend on the unit.
    mantissa = torch.frexp(greatest**2).mantissa
    unit = torch.where(greatest.isfinite() & (greatest > 0), greatest**2 / mantissa, 1.0)
    counts = torch.zeros(_CUTS, dtype=torch.int64, device=device)
    for block in _blocks(gradients):
        rest = block.double().square_().div_(unit)
        for cut in range(_CUTS):
            rest.mul_(2**_BITS)
            whole = rest.floor()
            counts[cut] += whole.to(torch.int64).sum()
            rest.sub_(whole)
    if not alone:
        dist.all_reduce(counts, group=group)
    total = torch.zeros_like(greatest)
    for cut in reversed(range(_CUTS)):
        total += counts[cut].double() * 2.0 ** (-_BITS * (cut + 1))
    return torch.where(greatest.isfinite(), (total * unit).sqrt(), torch.nan)


def _norms(gradient: torch.Tensor) -> Iterator[torch.Tensor]:
    """Returns the norms of short rows, whose squares add up in the gradient's own dtype with little rounding."""
    rows = gradient.numel() // _ROW
    if rows:
        yield torch.linalg.vector_norm(gradient[: rows * _ROW].view(rows, _ROW), dim=1)
    if gradient.numel() > rows * _ROW:
        yield torch.linalg.vector_norm(gradient[rows * _ROW :].view(1, -1), dim=1)


def _blocks(gradients: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    for gradient in gradients:
        yield from gradient.split(_CPU_BLOCK if gradient.device.type == "cpu" else _BLOCK)
