"""The counters count correctly on a group of four ranks that do not exist."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_lgamp.runtime.measure import CollectiveCounter, PeakMemory, live_tensors

RANKS = 4


@pytest.fixture
def four_ranks():
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def gather_coalesced():
    with dist._coalescing_manager(async_ops=True):
        dist.all_gather_into_tensor(torch.empty(8), torch.ones(2))
        dist.all_gather_into_tensor(torch.empty(16), torch.ones(4))


CALLS = {
    "all_gather": (lambda: dist.all_gather_into_tensor(torch.empty(8), torch.ones(2)), 3 * 8),
    "all_gather, list": (lambda: dist.all_gather([torch.empty(2) for _ in range(RANKS)], torch.ones(2)), 3 * 8),
    "all_gather, coalesced": (gather_coalesced, 3 * (8 + 16)),
    "reduce_scatter": (lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.ones(8)), 32 * 3 // 4),
    "all_to_all": (lambda: dist.all_to_all_single(torch.empty(8), torch.ones(8)), 32 * 3 // 4),
    "all_to_all, uneven": (
        lambda: dist.all_to_all_single(torch.empty(6), torch.ones(8), [0, 2, 2, 2], [2, 2, 2, 2]),
        32 * 3 // 4,
    ),
    "all_reduce": (lambda: dist.all_reduce(torch.ones(8)), 2 * 32 * 3 // 4),
    "broadcast": (lambda: dist.broadcast(torch.ones(8), 0), 32 * 3 // 4),
    "reduce": (lambda: dist.reduce(torch.ones(8), 0), 32 * 3 // 4),
    "send": (lambda: dist.send(torch.ones(8), 1), 32),
    "receive": (lambda: dist.recv(torch.ones(8), 1), 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_bytes_are_what_a_rank_sends(four_ranks, name):
    call, expected = CALLS[name]
    with CollectiveCounter() as counter:
        call()
    assert counter.log == [(name.partition(",")[0], expected)]


def test_memory_inside_wrappers_is_counted_and_that_of_wrappers_is_not(four_ranks):
    wrapped = distribute_tensor(torch.ones(1024), init_device_mesh("cpu", (RANKS,)), [Shard(0)])
    assert not any(tensor is wrapped for tensor in live_tensors())
    with PeakMemory([wrapped.to_local()]) as memory:
        result = (wrapped + 1) * 2
    assert memory.peak == 3 * 1024, "a quarter of 4 KiB, three times"
    del result


def test_a_view_counts_as_all_of_its_memory():
    with PeakMemory() as memory:
        part = torch.ones(100)[:10]
        other = torch.ones(50)
        assert memory.peak == memory.live() == 4 * (100 + 50)
    del part, other
