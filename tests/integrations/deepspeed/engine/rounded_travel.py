"""Looks at what travels rounded in an engine, with numbers made by hand."""

import torch
import torch.distributed as dist

from ds_lgamp.partition.agreement import everyone
from ds_lgamp.partition.flat_storage import FlatStorage
from ds_lgamp.partition.shards import GradientReduction
from tests.partition.rounding import rounded


class Seen:
    """What the units of a rank have moved since the last :meth:`check`."""

    def __init__(self, partition, patch):
        self.units = {unit.storage: unit for unit in partition.units}
        self.of_reduction = {unit.reduction: unit for unit in partition.units}
        self.gathered, self.local, self.final = {}, {}, {}
        complete, start, final = FlatStorage._complete, GradientReduction.start, GradientReduction.final_gradient
        patch.setattr(FlatStorage, "_complete", lambda storage: self._complete(storage, complete))
        patch.setattr(GradientReduction, "start", lambda reduction: self._start(reduction, start))
        patch.setattr(GradientReduction, "final_gradient", lambda reduction: self._final(reduction, final))

    def _complete(self, storage, complete):
        complete(storage)
        self.gathered.setdefault(self.units[storage].name, []).append((storage.flat.clone(), storage.kept.clone()))

    def _start(self, reduction, start):
        self.local.setdefault(self.of_reduction[reduction].name, []).append(reduction._gradient.clone())
        start(reduction)

    def _final(self, reduction, final):
        # Later, clipping multiplies it.
        gradient = final(reduction)
        self.final[self.of_reduction[reduction].name] = gradient.clone()
        return gradient

    def check(self, weights, gradients):
        """Compares everything with what is rounded by hand. Collective over all ranks. Returns how many gathers and
        gradients it has compared."""
        ranks = everyone((dist.get_rank(), self.gathered, self.local))
        of_rank = {rank: (gathered, local) for rank, gathered, local in ranks}
        units = {unit.name: unit for unit in self.units.values()}
        for name, gathers in self.gathered.items():
            members = dist.get_process_group_ranks(units[name].policy.data_group)
            for index, (flat, _) in enumerate(gathers):
                shards = torch.cat([of_rank[rank][0][name][index][1] for rank in members])
                assert torch.equal(flat, by_parameter(units[name], shards, weights)), name
        for name, final in self.final.items():
            unit = units[name]
            tied = [dist.get_rank()] if unit.tie_group is None else dist.get_process_group_ranks(unit.tie_group)
            # Ranks of a data-parallel group are neighbours, in every pipeline rank.
            own = dist.get_process_group_ranks(unit.policy.data_group)
            expected = 0
            for copy in tied:
                members = [rank + copy - dist.get_rank() for rank in own]
                total = 0
                for group, _ in enumerate(self.local[name]):
                    parts = [by_parameter(unit, of_rank[rank][1][name][group], gradients) for rank in members]
                    total = total + sum(part.float() for part in parts)
                expected = expected + total / len(own)
            size = final.numel()
            assert torch.equal(final, expected[unit.storage.shard_start :][:size]), name
        counts = sum(map(len, self.gathered.values())), len(self.final)
        for seen in (self.gathered, self.local, self.final):
            seen.clear()
        return counts


def by_parameter(unit, flat, bits):
    """Rounds a flat storage, parameter by parameter."""
    found = torch.zeros_like(flat)
    for offset, (_, shape, _) in zip(unit.storage.offsets, unit.storage.contents()):
        place = slice(offset, offset + torch.Size(shape).numel())
        found[place] = rounded(flat[place], bits)
    return found
