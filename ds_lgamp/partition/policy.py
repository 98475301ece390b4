"""What all units of a partition share."""

from typing import NamedTuple

import torch
import torch.distributed as dist


class ZeroPolicy(NamedTuple):
    """How units are spread over ranks, and how their gradients add up."""

    data_group: dist.ProcessGroup
    """The data-parallel ranks that share every unit."""
    zero_stage: int
    """0 to 3."""
    gradient_dtype: torch.dtype | None = None
    """Gradients accumulate in it over micro-batches; None is the dtype of the parameters."""
    communication_dtype: torch.dtype | None = None
    """Gradients travel in it between data-parallel ranks; None is the dtype in which they accumulate."""
    in_rank_order: bool = False
    """Whether gradients add up in the order of data-parallel ranks at every stage and on every backend."""
    tensor_group: dist.ProcessGroup | None = None
    """The tensor-parallel ranks; None if there is one."""

    @property
    def partitioned(self) -> bool:
        """Whether each data-parallel rank updates a part of a unit, not all of it."""
        return self.zero_stage > 0 and self.data_group.size() > 1

    @property
    def is_first_tensor_rank(self) -> bool:
        """Whether this rank speaks for parameters that are the same on all tensor-parallel ranks."""
        return self.tensor_group is None or self.tensor_group.rank() == 0
