"""Values travel between the ranks of a pipeline whole, whatever is in them."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_leaves

from ds_lgamp.integrations.deepspeed.plain.between_ranks import Exchange
from ds_lgamp.partition.agreement import everyone, own_host_group
from testing import simnccl
from testing.ranks import run_on_ranks

RANKS = 3


def value_of(rank: int):
    """Makes a value whose tensors have sizes that no alignment divides."""
    flags = torch.arange(5 + rank) % 2 == 0
    half = torch.full((3, rank), 0.5, dtype=torch.bfloat16)
    return [{"flags": flags, "tokens": torch.arange(3) + rank}, (half, torch.tensor(rank), f"rank {rank}", None)]


def exchanged():
    exchange = Exchange(dist.group.WORLD, dist.group.WORLD, torch.device("cpu"))
    own = value_of(dist.get_rank())
    gathered = exchange.gather(own)
    nothing = exchange.gather(["no tensor", dist.get_rank()])
    values = [value_of(10 + rank) for rank in range(RANKS)] if dist.get_rank() == 1 else None
    return gathered, nothing, exchange.scatter(values, source=1)


def test_every_rank_gets_the_values_of_all_and_its_own_of_another():
    for rank, (gathered, nothing, scattered) in enumerate(run_on_ranks(RANKS, exchanged)):
        assert_equal(gathered, [value_of(each) for each in range(RANKS)])
        assert nothing == [["no tensor", each] for each in range(RANKS)]
        assert_equal(scattered, value_of(10 + rank))


def places_of_received():
    """Returns by how many bytes each tensor from another rank begins behind a multiple of 16."""
    exchange, rank = Exchange(dist.group.WORLD, dist.group.WORLD, torch.device("cpu")), dist.get_rank()
    values = [value_of(each) for each in range(RANKS)] if rank == 0 else None
    received = exchange.gather(value_of(rank)), exchange.scatter(values, 0), exchange.collect(value_of(rank), 1)
    return [leaf.data_ptr() % 16 for leaf in tree_leaves(received) if torch.is_tensor(leaf) and leaf.numel() > 1]


def test_kernels_may_load_16_bytes_at_once_from_every_received_tensor():
    """Some kernels of GPUs fail where a tensor begins elsewhere."""
    for places in run_on_ranks(RANKS, places_of_received):
        assert places and not any(places)


def backends_of_descriptions():
    """Returns the backends on which ranks describe values to each other."""
    backends, stock = [], dist.all_gather_object

    def noted(values, own, group=None):
        backends.append(dist.get_backend(group))
        return stock(values, own, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_object", noted)
        hosts = own_host_group([range(RANKS)], dist.group.WORLD)
        exchange = Exchange(dist.group.WORLD, hosts, torch.device("cpu"))
        exchange.gather(value_of(dist.get_rank()))
        exchange.scatter([value_of(rank) for rank in range(RANKS)] if dist.get_rank() == 1 else None, source=1)
    return backends


def test_hosts_describe_values_without_their_devices():
    """Through NCCL, a host would wait for its device."""
    assert run_on_ranks(RANKS, backends_of_descriptions, backend=simnccl.NAME) == [["gloo"] * 2] * RANKS


def assert_equal(value, wanted):
    """Asserts that values are equal to the bit."""
    (leaves, structure), (wanted_leaves, wanted_structure) = tree_flatten(value), tree_flatten(wanted)
    assert structure == wanted_structure
    for leaf, wanted_leaf in zip(leaves, wanted_leaves):
        assert torch.equal(leaf, wanted_leaf) if torch.is_tensor(wanted_leaf) else leaf == wanted_leaf


def hosts_beside_another_group():
    """Returns backend and ranks of this pipeline's group of hosts. Rank 0 is in one more group than the others."""
    dist.new_group([0])
    pipelines = [[0, 2], [1, 3]]
    own = [dist.new_group(ranks) for ranks in pipelines][dist.get_rank() % 2]
    hosts = own_host_group(pipelines, own)
    return dist.get_backend(hosts), dist.get_process_group_ranks(hosts), everyone(dist.get_rank(), hosts)


def test_every_pipeline_gets_a_group_of_hosts_whatever_groups_its_ranks_are_in():
    found = run_on_ranks(4, hosts_beside_another_group, backend=simnccl.NAME)
    assert found == [("gloo", ranks, ranks) for ranks in ([0, 2], [1, 3], [0, 2], [1, 3])]
