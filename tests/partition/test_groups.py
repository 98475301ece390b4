"""Groups of hierarchical shards."""

import torch.distributed as dist

from ds_lgamp.partition.policy import node_groups
from ds_lgamp.schedule.hierarchy import Hierarchy
from testing.ranks import run_on_ranks


def make_groups():
    # Rank 0 is in one group more than the others, as the ends of a pipeline are in fewer than its middle.
    dist.new_group([0])
    nodes = node_groups(Hierarchy(2, False), [[0, 1, 2, 3]])
    again = node_groups(Hierarchy(2, True), [[0, 1, 2, 3]])
    return [dist.get_process_group_ranks(group) for group in (nodes.inside, nodes.peers, again.inside, again.peers)]


def test_ranks_in_unequal_numbers_of_groups_meet():
    first, _, _, last = run_on_ranks(4, make_groups, seconds=60)
    assert first == [[0, 1], [0, 2]] * 2
    assert last == [[2, 3], [1, 3]] * 2
