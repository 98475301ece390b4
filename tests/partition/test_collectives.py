"""Reductions of half-precision gradients add in full precision. Sums in rank order add in exactly that order. Ranks in
unequal numbers of groups make the same groups."""

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.partition.collectives import start_all_reduce, start_reduce_scatter
from ds_lgamp.partition.policy import UnitParameter, ZeroPolicy, node_groups
from ds_lgamp.partition.unit import Unit
from ds_lgamp.schedule.spec import Hierarchy
from testing.ranks import run_on_ranks

SMALL = 2.0**-9
"""bf16 cannot represent 1 + SMALL."""


def reduced():
    own = torch.tensor([1.0, SMALL] if dist.get_rank() == 0 else [SMALL, 1.0], dtype=torch.bfloat16)
    return start_reduce_scatter(own, dist.group.WORLD, torch.float32)()


def test_a_sum_of_bf16_is_not_rounded_to_bf16():
    for part in run_on_ranks(2, reduced):
        assert part.dtype == torch.float32
        assert part.item() == pytest.approx(1 + SMALL, abs=0)


RANKS, ELEMENTS = 5, 1003
"""An odd number, and enough ranks that torch's own sum adds some elements in another order than the rest."""


def addend(rank):
    return torch.randn(RANKS * ELEMENTS, generator=torch.Generator().manual_seed(rank))


def sums_in_rank_order():
    rank, group = dist.get_rank(), dist.group.WORLD
    part = start_reduce_scatter(addend(rank), group, torch.float32, in_rank_order=True)()
    return part, start_all_reduce(addend(rank), group, in_rank_order=True)()


def test_every_element_is_added_in_rank_order():
    total = addend(0)
    for rank in range(1, RANKS):
        total += addend(rank)
    for rank, (part, whole) in enumerate(run_on_ranks(RANKS, sums_in_rank_order)):
        assert torch.equal(part, total[rank * ELEMENTS : (rank + 1) * ELEMENTS])
        assert torch.equal(whole, total)


def average_of_large_gradients(zero_stage):
    """Returns the gradient that the optimizer gets from a unit whose gradients travel in fp16."""
    weight = torch.nn.Parameter(torch.zeros(64))
    policy = ZeroPolicy(dist.group.WORLD, zero_stage, communication_dtype=torch.float16)
    unit = Unit("chunk 0", [UnitParameter("0.weight", weight, 0)], policy)
    unit.reduction.begin_accumulation()
    weight.grad.fill_(40000.0)
    unit.reduction.start()
    unit.reduction.finish()
    unit.finish_gradient()
    return unit.master.segments[0].shard.grad.unique().tolist()


def averages_of_large_gradients():
    return [average_of_large_gradients(zero_stage) for zero_stage in (0, 2)]


def test_gradients_that_travel_in_fp16_are_averaged_before_their_sum_leaves_its_range():
    assert run_on_ranks(2, averages_of_large_gradients) == [[[40000.0], [40000.0]]] * 2


def memory_of_a_reduction():
    """Returns the bytes of what the ranks have received, after its sum is there, though somebody keeps the tensor."""
    received, exchange = [], dist.all_to_all_single

    def keeping(output, *arguments, **options):
        received.append(output)
        return exchange(output, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", keeping)
        total = start_reduce_scatter(torch.ones(4), dist.group.WORLD, torch.float32)()
    return total.tolist(), [each.untyped_storage().nbytes() for each in received]


def test_what_was_received_is_freed_when_it_is_summed_up():
    """A thread of gloo keeps it for a while."""
    assert run_on_ranks(2, memory_of_a_reduction) == [([2.0, 2.0], [0])] * 2


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
