"""A unit: the parameters of one chunk, or of one tied module, which move together."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ds_lgamp.partition.flat_storage import FlatStorage, UnitParameter
from ds_lgamp.partition.gradient_reduction import GradientReduction
from ds_lgamp.partition.policy import ZeroPolicy
from ds_lgamp.partition.segments import MasterWeights


class Unit:
    """Joins the parts of parameters that are gathered, released and reduced together: ``storage``, where they lie,
    ``reduction``, which sums their gradient, and ``master``, which the optimizer updates.

    A unit is frozen if none of its parameters requires a gradient. A frozen unit is gathered and released only, at
    stage 3; it has no gradient and no master weights of its own.

    Args:
        name: its name in errors and traces.
        parameters: at least one; all of one dtype and on one device, all frozen or none. They are sorted by optimizer
            group here, so that each group owns one range.
        policy: what all units of a partition share.
        tied: whether the unit is a tied module, which does not count as a chunk.
        tie_group: the pipeline ranks that hold a copy of a tied unit; None if there is no other copy.

    Raises:
        ValueError: the parameters have several dtypes.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[UnitParameter],
        policy: ZeroPolicy,
        tied: bool = False,
        tie_group: dist.ProcessGroup | None = None,
    ) -> None:
        dtypes = {str(entry.parameter.dtype) for entry in parameters}
        if len(dtypes) != 1:
            raise ValueError(f"{name} has parameters of {' and '.join(sorted(dtypes))}; convert them to one")
        self.name = name
        self.policy = policy
        self.tied = tied
        self.tie_group = tie_group
        self.trains = any(entry.parameter.requires_grad for entry in parameters)
        """False if the unit is frozen."""
        self.storage = FlatStorage(sorted(parameters, key=lambda entry: entry.segment_key), policy)
        self.master = MasterWeights(self.storage, policy, self.trains, tie_group)
        self.reduction = GradientReduction(self.storage, policy, self.master.values.dtype, tie_group)

    @torch.no_grad()
    def replace_shard(self, master: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Sets this rank's master weights and shard. All data-parallel ranks call it together; the next gather brings
        the others' parts.

        Args:
            master: values of the master weights.
            weights: values of the shard; by default the master weights rounded to its dtype.
        """
        self.storage.finish_gather()
        self.master.values.copy_(master)
        self.storage.replace_shard(self.master.values if weights is None else weights)

    @torch.no_grad()
    def replace_slice(self, within: slice, master: torch.Tensor) -> None:
        """Sets a slice of this rank's master weights and shard. Full parameters that are resident do not follow."""
        self.storage.finish_gather()
        self.master.values[within] = master
        self.storage.shard[within] = self.master.values[within]

    def adopt(self, within: slice = slice(None), keep_bits: bool = False) -> None:
        """Takes the shard and the master weights, or a slice of them, from the full parameters. Where those are
        released, it takes the master weights from the shard. With ``keep_bits``, master weights whose weight has not
        changed stay as they are."""
        self.storage.adopt(within)
        self.master.adopt(within, keep_bits)

    def finish_gradient(self) -> None:
        """Hands every segment its part of the final gradient."""
        self.master.take_gradient(self.reduction.final_gradient())

    @torch.no_grad()
    def follow_update(self) -> None:
        """Brings the shard up to date after the optimizer changed the master weights."""
        self.storage.replace_shard(self.master.values)

    def drop_gradient(self) -> None:
        """Frees the gradient after the step."""
        self.master.drop_gradients()
        self.reduction.drop_gradient()
