"""Makes process groups: several that share no rank, and those of hierarchical shards."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ds_lgamp.partition.agreement import host_group
from ds_lgamp.partition.policy import NodeGroups
from ds_lgamp.schedule.hierarchy import Hierarchy


def node_groups(hierarchy: Hierarchy, data_ranks: Sequence[Sequence[int]]) -> NodeGroups:
    """Makes this rank's two groups. Collective over all ranks.

    Args:
        data_ranks: the global ranks of every data-parallel group, in their order.
    """
    size = hierarchy.node_ranks
    inside = [list(ranks[first : first + size]) for ranks in data_ranks for first in range(0, len(ranks), size)]
    peers = [list(ranks[place::size]) for ranks in data_ranks for place in range(size)]
    own, own_peers = own_of_disjoint(inside), own_of_disjoint(peers)
    assert own is not None and own_peers is not None, "every rank is in one group of each kind"
    return NodeGroups(own, own_peers, hierarchy.replicated)


def own_of_disjoint(
    groups: Sequence[Sequence[int]], timeout: timedelta | None = None, options: Callable[[], Any] = lambda: None
) -> dist.ProcessGroup | None:
    """Makes groups that share no rank. Returns this rank's; None if it is in none. Collective over all ranks.

    If the default group is bound to a device, torch splits communicators, and every split is collective over all ranks.
    One split then makes all groups. Otherwise every rank calls ``new_group`` for every group: those outside only count
    it. With ``use_local_synchronization`` they would not. But torch then names a group after the number of groups that
    a rank is in, and members that are in unequal numbers of groups wait for each other under different names.

    Args:
        timeout: of the groups; None is torch's default.
        options: makes the options of a group. Each group gets its own, because torch writes the group's name into them.
    """
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialised"
    # Splits of two backends would meet under names that count a rank's groups, which are unequal.
    if world.bound_device_id is not None and dist.get_backend() == "nccl":
        # Without options, releases of torch up to 2.9 write the split's ranks into those of the default group.
        split_options = options() or dist.ProcessGroupNCCL.Options()
        return dist.split_group(split_ranks=list(map(sorted, groups)), timeout=timeout, pg_options=split_options)
    made = [dist.new_group(sorted(ranks), timeout=timeout, pg_options=options()) for ranks in groups]
    return next((group for ranks, group in zip(groups, made) if dist.get_rank() in ranks), None)


def own_host_group(groups: Sequence[Sequence[int]], own: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a group of the ranks of ``own`` through which hosts talk, without their devices. It runs on gloo.
    Collective over all ranks.

    Args:
        groups: the global ranks of groups that share no rank; together they have all ranks.
        own: this rank's.
    """
    if dist.get_backend(own) == "gloo":
        return own
    if len(groups) == 1:
        return host_group()
    made = [dist.new_group(sorted(ranks), backend="gloo") for ranks in groups]
    return next(group for ranks, group in zip(groups, made) if dist.get_rank() in ranks)
