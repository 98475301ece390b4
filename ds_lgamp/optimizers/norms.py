"""The norm of the gradient over all ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_lgamp.partition.unit import Observer, Unit
from ds_lgamp.partition.zero_partition import ZeroPartition

_ROW = 4096
"""Number of elements whose squares :func:`global_norm` adds up in fp32."""
_BITS, _CUTS = 22, 3
"""Bits of a cut, and cuts of a square.

:func:`exact_norms` counts 66 bits of every square, from the first bit of the greatest square down, in three cuts of 22
bits. An int64 holds the sum of 2^41 numbers of 22 bits. The bits left out of that many squares add up to less than
2^-25 of the greatest square.
"""
_CPU_BLOCK, _BLOCK = 1 << 16, 1 << 24
"""Number of elements in a block, on a CPU and on other devices.

On a CPU the fp64 copy of a block stays in the cache. Elsewhere blocks are larger, since every call costs time, but
small enough that the copy takes little memory.
"""


class GradientNorm(Observer):
    """The norm of the gradient of a partition over all ranks.

    It takes the norms of the rows of a gradient before that goes to the host, and before an update may change it.

    Args:
        group: all ranks; None if this rank is alone.
        reproducible: whether the norm must not depend on how gradients are spread over ranks.
    """

    def __init__(self, partition: ZeroPartition, group: dist.ProcessGroup | None, reproducible: bool) -> None:
        self._partition, self._group, self._reproducible = partition, group, reproducible
        self._stored: dict[Unit, list[torch.Tensor]] = {}
        """Norms of the rows of gradients that went to the host."""
        self._early: dict[Unit, list[torch.Tensor]] = {}
        """The same of units that are updated before the step."""
        self.watch(partition.units)

    def watch(self, units: Iterable[Unit]) -> None:
        """Watches ``units`` of the partition."""
        for unit in units:
            if unit.policy.host is not None and not self._reproducible:
                unit.observers.append(self)

    def gradient_final(self, unit: Unit, gradient: torch.Tensor) -> None:
        self._stored[unit] = [norm for part in unit.master.counted_parts(gradient) for norm in row_norms(part)]

    def measure(self, unit: Unit) -> None:
        """Takes the norms of a unit that is updated before the step."""
        self._early[unit] = self._rows(unit, may_have_changed=False)

    def take(self, may_have_changed: bool, beside: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the norm of all final gradients, with the ones that :meth:`measure` has seen. Collective.

        Args:
            may_have_changed: whether user code may have changed gradients on the host.
            beside: as for :func:`global_norm`.
        """
        partition = self._partition
        if self._reproducible:
            return exact_norm(partition.counted_gradients(), self._group, partition.device, beside)
        rows: list[torch.Tensor] = []
        for unit in partition.units:
            early = self._early.pop(unit, None)
            rows.extend(self._rows(unit, may_have_changed) if early is None else early)
        return _norm_of_rows(rows, self._group, partition.device, beside)

    def _rows(self, unit: Unit, may_have_changed: bool) -> list[torch.Tensor]:
        stored = self._stored.pop(unit, None)
        if stored is not None and not may_have_changed:
            return stored
        unit.settle_store()
        rows = [norm for gradient in unit.master.counted_gradients() for norm in row_norms(gradient)]
        return rows if unit.policy.host is None else [norm.to(unit.storage.flat.device) for norm in rows]


def global_norm(
    gradients: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    device: torch.device,
    beside: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the 2-norm of the gradient over all ranks, in fp64. The norms of its rows are rounded to fp32.

    Nothing is copied to the host, and no gradient is converted: torch's norm with an fp64 result would copy the
    gradient. The norm is infinite if the sum of the squares of a row exceeds fp32, as with elements of 3e17.

    Args:
        gradients: the gradients of this rank, flat.
        group: all ranks; None if this rank is alone.
        device: where the norm is computed.
        beside: a whole number [] in fp64 that is summed over all ranks, in place, by the same message.
    """
    return _norm_of_rows([norm for gradient in gradients for norm in row_norms(gradient)], group, device, beside)


def _norm_of_rows(
    norms: list[torch.Tensor],
    group: dist.ProcessGroup | None,
    device: torch.device,
    beside: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the norm from the :func:`row_norms` of all gradients of this rank."""
    total = torch.cat(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)
    _all_reduce(total, dist.ReduceOp.SUM, group, beside)
    return total.sqrt()


def clip_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """Returns the factor that brings gradients of this ``norm`` down to at most ``limit``, as clip_grad_norm_ does."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def exact_norm(
    gradients: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    device: torch.device,
    beside: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns what :func:`global_norm` does, of gradients in fp32 or a smaller dtype, but the same to the bit however
    the gradient is cut and spread over ranks; NaN if any gradient is inf or NaN."""

    def over_ranks(values: torch.Tensor, operation: Any) -> None:
        _all_reduce(values, operation, group, beside if operation == dist.ReduceOp.SUM else None)

    return exact_norms([gradients], over_ranks, device)[0]


def exact_norms(
    vectors: Sequence[Sequence[torch.Tensor]],
    over_ranks: Callable[[torch.Tensor, Any], None],
    device: torch.device,
) -> torch.Tensor:
    """Returns the 2-norms [vectors] over all ranks, each as :func:`exact_norm` does.

    The square of an fp32 number is exact in fp64. Each square is cut into whole numbers of a few fixed units, and whole
    numbers add up without rounding. The greatest element decides the largest unit. After J. Demmel and H. D. Nguyen,
    "Parallel Reproducible Summation", IEEE Transactions on Computers 64(7), 2015, with integers for their bins.

    Args:
        vectors: the parts of every vector on this rank, in fp32 or a smaller dtype.
        over_ranks: all-reduces values [vectors, ...] over the ranks that share each vector, with a ReduceOp.
        device: where the norms are computed.
    """
    greatest = torch.zeros(len(vectors), dtype=torch.float64, device=device)
    for index, parts in enumerate(vectors):
        for block in _blocks(parts, device):
            # NaN does not survive a maximum over ranks.
            own = block.abs().max().double().nan_to_num(nan=torch.inf, posinf=torch.inf)
            greatest[index] = torch.maximum(greatest[index], own)
    over_ranks(greatest, dist.ReduceOp.MAX)
    # Without elements, or with infinite ones, the result does not depend on the unit.
    mantissa = torch.frexp(greatest**2).mantissa
    units = torch.where(greatest.isfinite() & (greatest > 0), greatest**2 / mantissa, 1.0)
    counts = torch.zeros(len(vectors), _CUTS, dtype=torch.int64, device=device)
    for index, parts in enumerate(vectors):
        for block in _blocks(parts, device):
            rest = block.double().square_().div_(units[index])
            for cut in range(_CUTS):
                rest.mul_(2**_BITS)
                whole = rest.floor()
                counts[index, cut] += whole.to(torch.int64).sum()
                rest.sub_(whole)
    over_ranks(counts, dist.ReduceOp.SUM)
    total = torch.zeros_like(greatest)
    for cut in reversed(range(_CUTS)):
        total += counts[:, cut].double() * 2.0 ** (-_BITS * (cut + 1))
    return torch.where(greatest.isfinite(), (total * units).sqrt(), torch.nan)


def row_norms(gradient: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the norms of short rows in fp32, or in fp64 of such a gradient. Their squares add up with little
    rounding."""
    if gradient.itemsize < 4:
        # A norm in another dtype copies on some devices.
        for block in _blocks([gradient], gradient.device):
            yield from row_norms(block.float())
        return
    rows = gradient.numel() // _ROW
    if rows:
        yield torch.linalg.vector_norm(gradient[: rows * _ROW].view(rows, _ROW), dim=1)
    if gradient.numel() > rows * _ROW:
        yield torch.linalg.vector_norm(gradient[rows * _ROW :].view(1, -1), dim=1)


def _all_reduce(
    values: torch.Tensor, operation: Any, group: dist.ProcessGroup | None, beside: torch.Tensor | None
) -> None:
    """Reduces ``values`` over all ranks in place and, in the same message, the number ``beside``."""
    if group is None or group.size() == 1:
        return
    if beside is None:
        dist.all_reduce(values, operation, group)
        return
    message = torch.cat([values.reshape(-1), beside.to(values.dtype).reshape(1)])
    dist.all_reduce(message, operation, group)
    values.copy_(message[:-1].view(values.shape))
    beside.copy_(message[-1])


def _blocks(gradients: Sequence[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    """Yields the gradients in blocks on ``device``."""
    for gradient in gradients:
        for block in gradient.split(_CPU_BLOCK if device.type == "cpu" else _BLOCK):
            yield block if block.device == device else block.to(device)
