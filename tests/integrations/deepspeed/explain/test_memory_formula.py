"""The memory formula equals the partition's memory for weights and gradients."""

import itertools
from functools import partial

import pytest
import torch

from ds_lgamp.cost.memory import rank_memory
from ds_lgamp.cost.units import Sharding
from ds_lgamp.optimizers.updates import postpone, start_postponed
from ds_lgamp.partition.policy import NodeGroups, ZeroPolicy
from ds_lgamp.partition.zero_partition import ZeroPartition
from ds_lgamp.runtime.measure import PeakMemory
from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import Hierarchy
from tests.integrations.deepspeed.explain.imagined_rank import (
    CASES,
    SIZES,
    element_of,
    imagined_group,
    partition_of,
    sizes_of_experts,
    spec_of,
)
from tests.pairwise import pairwise
from tests.slow import slow_except

__all__ = ["imagined_group"]


DTYPES = [
    (torch.float32, None, None, True),
    (torch.bfloat16, None, None, True),
    (torch.bfloat16, torch.float32, None, True),
    (torch.float32, None, torch.float16, True),
    (torch.float16, None, torch.bfloat16, True),
    (torch.float16, None, torch.float32, True),
    (torch.float16, torch.float32, torch.float16, True),
    (torch.bfloat16, None, None, False),
    (torch.bfloat16, torch.float32, None, False),
    (torch.bfloat16, torch.float32, torch.bfloat16, False),
]
"""Of weights, of gradients that add up and of those that travel; and whether the optimizer updates copies in fp32."""
_BETWEEN_NODES = {
    Kind.REFRESH: ZeroPartition.refresh,
    Kind.WAIT_REFRESH: ZeroPartition.wait_refresh,
    Kind.COMBINE: ZeroPartition.combine,
    Kind.WAIT_COMBINE: ZeroPartition.wait_combine,
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_memory_is_what_the_partition_takes(case, dtypes, imagined_group):
    tie_group = imagined_group(2)
    for data_ranks in (1, 2, 3):
        data_group = imagined_group(data_ranks)
        for zero_stage, in_rank_order in itertools.product(range(4), (False, True)):
            compare_memory(CASES[case], zero_stage, data_group, tie_group, *dtypes, in_rank_order)


def in_pairs(places):
    """Returns every case, data types and place for three parameters. A few are in the default set, those that hold
    every pair of factors are slow, and the others run only with ``-m full``."""
    every = [*itertools.product(CASES, DTYPES, places)]
    kinds = "weights", "gradients", "travel", "copies"
    described = [dict(zip(("case", "place", *kinds), (case, place, *dtypes))) for case, dtypes, place in every]
    covering = [every[described.index(chosen)] for chosen in pairwise(described)]
    default = [*itertools.product(["layered", "groups"], [DTYPES[0], DTYPES[6]], places)]
    return slow_except(default, every, several=True, slow=covering)


@pytest.mark.parametrize(
    ("case", "dtypes", "hierarchy"), in_pairs([Hierarchy(2, replicated=False), Hierarchy(2, replicated=True)]), ids=str
)
def test_memory_of_hierarchical_shards_is_what_the_partition_takes(case, dtypes, hierarchy, imagined_group):
    """Three nodes of two ranks."""
    nodes = NodeGroups(imagined_group(2), imagined_group(3), hierarchy.replicated)
    tie_group, data_group = imagined_group(2), imagined_group(6)
    for in_rank_order in (False, True):
        compare_memory(CASES[case], 3, data_group, tie_group, *dtypes, in_rank_order, hierarchy, nodes)


@pytest.mark.parametrize(("case", "dtypes", "data_ranks"), in_pairs([4, 2]), ids=str)
def test_memory_of_experts_that_ranks_divide_is_what_the_partition_takes(case, dtypes, data_ranks, imagined_group):
    """Two of four ranks have the same experts, and one of two."""
    tie_group = imagined_group(2)
    data_group, sharing = imagined_group(data_ranks), imagined_group(data_ranks // 2)
    for zero_stage, in_rank_order in itertools.product(range(4), (False, True)):
        compare_memory(CASES[case], zero_stage, data_group, tie_group, *dtypes, in_rank_order, sharing=sharing)


def compare_memory(
    case,
    zero_stage,
    data_group,
    tie_group,
    dtype,
    gradient_dtype,
    communication_dtype,
    copies_weights,
    in_rank_order,
    hierarchy=None,
    nodes=None,
    sharing=None,
):
    updates = case[-1]
    spec = spec_of(case, zero_stage, hierarchy=hierarchy, updates=updates, defers_gathers=updates == "next_step")
    actions = build_program(spec)[0]
    policy = ZeroPolicy(data_group, zero_stage, gradient_dtype, communication_dtype, in_rank_order, nodes=nodes)
    policy = policy._replace(copies_weights=copies_weights)
    partition = partition_of(policy, dtype, tie_group, sharing)
    experts = [] if sharing is None else sizes_of_experts(data_group.size() // sharing.size())
    # A chunk has tied modules last, and what follows one another takes memory for a moment.
    sizes = sorted(SIZES + experts, key=lambda size: size.tied)
    follow(partition, actions, updates)
    stored = [each for unit in partition.units for each in (unit.storage.flat, unit.storage.shard)]
    state = [
        each
        for unit in partition.units
        for each in (unit.master.values, unit.reduction._gradient, unit.reduction.shard_gradient)
    ]
    measured = PeakMemory([tensor for tensor in stored + state if tensor is not None])
    del state
    with measured as memory:
        gradients, buffers = follow(partition, actions, updates)
    element = element_of(dtype, gradient_dtype, communication_dtype, copies_weights)
    sharding = Sharding(zero_stage, data_group.size(), hierarchy, in_rank_order, in_rank_order)
    formula = rank_memory(actions, sizes, sharding, element)
    label = (case, zero_stage, data_group.size(), dtype, gradient_dtype, communication_dtype, in_rank_order)
    held = {tensor.untyped_storage()._cdata: tensor for tensor in stored}
    assert formula.weights == sum(tensor.untyped_storage().nbytes() for tensor in held.values()), label
    converts = communication_dtype is not None or element.gradients != element.master
    # Conversions and additions need more memory for a moment. Only the peak shows it.
    partitioned = {unit.storage.partitioned for unit in partition.units}
    shows = not converts or (False not in partitioned and element.sums == element.master)
    assert formula.gradients == gradients or not shows or updates == "reduction", label
    assert (
        formula.gradient_buffers == buffers
        or hierarchy is not None
        or (converts and True in partitioned)
        or in_rank_order
    ), label
    assert formula.peak == memory.peak, label


def follow(partition, actions, updates):
    """Runs the partition's part of the actions.

    Returns the bytes of gradients at the step, and the most bytes of full gradients on their way to it.
    """
    gradients = buffers = 0
    for action in actions:
        if action.kind is Kind.GATHER:
            partition.gather(action.chunk)
        elif action.kind is Kind.RELEASE:
            partition.release(action.chunk)
        elif action.kind is Kind.WAIT_GATHER:
            partition.wait_gather(action.chunk)
        elif action.kind is Kind.BACKWARD:
            partition.begin_backward(action.chunk)
        elif action.kind is Kind.REDUCE:
            partition.reduce(action.chunk)
        elif action.kind is Kind.WAIT_REDUCE:
            partition.wait_reduce(action.chunk)
        elif action.kind in _BETWEEN_NODES:
            _BETWEEN_NODES[action.kind](partition, action.chunk)
        elif action.kind is Kind.UPDATE and updates == "reduction":
            for unit in partition.finish_gradients_of(action.chunk):
                update(unit)
        elif action.kind is Kind.UPDATE:
            start_postponed(partition.chunk_units[action.chunk])
        elif action.kind is Kind.STEP:
            partition.finish_gradients()
            final = [unit for unit in partition.units if unit.reduction.is_final]
            gradients = sum(unit.reduction.shard_gradient.nbytes for unit in final)
            for unit in final:
                if updates == "next_step":
                    postpone(unit, partial(update, unit))
                else:
                    update(unit)
        buffers = max(buffers, sum(bytes_on_the_way(unit) for unit in partition.units))
    return gradients, buffers


def update(unit):
    unit.follow_update()
    unit.drop_gradient()


def bytes_on_the_way(unit):
    gradient = unit.reduction._gradient
    if not unit.storage.partitioned or gradient is None:
        return 0
    received = unit.storage.shard.numel() * gradient.itemsize if unit.reduction._reducing is not None else 0
    return gradient.nbytes + received
