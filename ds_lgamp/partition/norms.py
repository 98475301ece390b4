"""Norms of the gradient of all ranks together."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

_ROW = 4096
"""Elements whose squares :func:`global_norm` adds up in fp32."""
_BITS, _CUTS = 22, 3
"""Of a square, the 66 bits below the greatest one's first are counted, 22 at a time: as many as 2^41 numbers of 22 bits
add up in an int64, and what is left out of them is less than 2^-25 of the greatest square."""
_CPU_BLOCK, _BLOCK = 1 << 16, 1 << 24
"""Elements that are worked on at once: copies in fp64 stay in a CPU's cache, and small on other devices, where every
call has its price."""


def global_norm(
    gradients: Sequence[torch.Tensor], group: dist.ProcessGroup | None, device: torch.device
) -> torch.Tensor:
    """The 2-norm of the gradients of all ranks together, fp64; rows of it are rounded to fp32.

    Nothing is copied to the host, and no gradient to another type: torch's norm with an fp64 result copies what it is
    taken of. The norm is infinite where fp32 does not hold the squares of a row, as of elements of 3e17.

    Args:
        gradients: this rank's, flat.
        group: all ranks; None if this one is alone.
    """
    norms = [norm for gradient in gradients for norm in _norms(gradient)]
    total = torch.cat(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)
    if group is not None and group.size() > 1:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def clip_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """What gradients are multiplied with so that their norm is at most ``limit`` (as torch's clip_grad_norm_)."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def exact_norm(
    gradients: Sequence[torch.Tensor], group: dist.ProcessGroup | None, device: torch.device
) -> torch.Tensor:
    """The 2-norm of the gradients of all ranks together, fp64, the same to the bit however they are cut and spread.

    Squares of fp32 numbers are exact in fp64. Each is cut into whole numbers of a few fixed units, the largest of which
    the greatest gradient decides, and whole numbers add up without rounding. After J. Demmel and H. D. Nguyen,
    "Parallel Reproducible Summation", IEEE Transactions on Computers 64(7), 2015, with integers for their bins.

    Not a number where one of them is infinite or none.

    Args:
        gradients: this rank's, fp32 or less.
        group: all ranks; None if this one is alone.
    """
    alone = group is None or group.size() == 1
    greatest = torch.zeros((), dtype=torch.float64, device=device)
    for block in _blocks(gradients):
        # Not a number does not survive a maximum over ranks.
        greatest = torch.maximum(greatest, block.abs().max().double().nan_to_num(nan=torch.inf, posinf=torch.inf))
    if not alone:
        dist.all_reduce(greatest, dist.ReduceOp.MAX, group)
    # Without gradients, or with infinite ones, any unit will do.
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
    """Those of short rows, whose squares add up in the gradient's own type without losing much."""
    rows = gradient.numel() // _ROW
    if rows:
        yield torch.linalg.vector_norm(gradient[: rows * _ROW].view(rows, _ROW), dim=1)
    if gradient.numel() > rows * _ROW:
        yield torch.linalg.vector_norm(gradient[rows * _ROW :].view(1, -1), dim=1)


def _blocks(gradients: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    for gradient in gradients:
        yield from gradient.split(_CPU_BLOCK if gradient.device.type == "cpu" else _BLOCK)
