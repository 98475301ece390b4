"""What crosses the bus is counted in two pools of main memory."""

import pytest
import torch

from benchmarks.contenders import Layout
from benchmarks.contenders.offload import ALL_ON_HOST, OPTIMIZER_ON_HOST, OUTER, OWN, PEERS
from benchmarks.model import ModelSize, block_elements
from benchmarks.offload import OFFLOADS, count, predicted
from benchmarks.two_pools import TwoPools


def gather_to(tensor, *where, **how):
    return tensor.to(*where, **how)


def stores(tensor):
    return tensor.to("cpu")


def test_copies_between_the_pools_count_and_others_do_not():
    host, device = torch.arange(4.0), torch.zeros(4)
    before = torch.Tensor.copy_, torch.Tensor.to
    with TwoPools([host], stores_in="stores") as pools:
        device.copy_(host)
        assert (pools.bytes_loaded, pools.bytes_stored) == (16, 0)
        host[2:].copy_(device[:2])
        assert (pools.bytes_loaded, pools.bytes_stored) == (16, 8)
        host.copy_(host.clone())
        assert (pools.bytes_loaded, pools.bytes_stored) == (16, 24), "a clone is a new tensor, on the device"
        loaded = gather_to(host, "cpu", non_blocking=True)
        assert loaded.data_ptr() != host.data_ptr() and torch.equal(loaded, host)
        assert (pools.bytes_loaded, pools.bytes_stored) == (32, 24)
        stored = stores(device)
        assert pools.on_host(stored) and stored.data_ptr() != device.data_ptr()
        assert (pools.bytes_loaded, pools.bytes_stored) == (32, 40)
        host[2:].copy_(host[:2])
        host.to(torch.float64)
        gather_to(device, torch.device("cpu"))
        stores(host)
        device.copy_(loaded)
        assert (pools.bytes_loaded, pools.bytes_stored) == (32, 40)
    assert (torch.Tensor.copy_, torch.Tensor.to) == before


def test_what_a_hook_of_the_backward_pass_copies_counts():
    host, weight = torch.zeros(4), torch.ones(4, requires_grad=True)

    def store(parameter):
        host.copy_(parameter.grad)

    weight.register_post_accumulate_grad_hook(store)
    with TwoPools([host]) as pools:
        weight.sum().backward()
    assert (pools.bytes_loaded, pools.bytes_stored) == (0, 16)


BLOCKS, RANKS = 4, 2
SIZE = ModelSize(blocks=BLOCKS, width=64)
RIGHT = {
    # A block is gathered twice, but the last one stays for its backward pass. A gradient goes to the host per
    # micro-batch.
    "FSDP2, all on the host": lambda m: ((2 - 1 / BLOCKS) * m, m),
    "FSDP2, all on the host, deferred sync": lambda m: ((2 - 1 / BLOCKS) * m, 1),
}


LOADS = {
    # Of four blocks, two stay on the device between forward and backward, or between two micro-batches.
    ALL_ON_HOST: {1: 1.5, 4: 1.5},
    OPTIMIZER_ON_HOST: {1: 1, 4: 1},
    OUTER: {1: 1.5, 4: 4.5},
}
"""Shards that ours loads, by micro-batches."""


@pytest.mark.parametrize("name", OFFLOADS)
def test_the_formula_depends_on_micro_batches_only_if_they_go_one_after_another(name):
    shard = 4 * block_elements(SIZE) * BLOCKS // RANKS
    for number, loads in LOADS[name].items():
        loaded, stored = predicted(Layout(1, RANKS, SIZE), number, *OFFLOADS[name])
        assert (loaded / shard, stored / shard) == (loads, 1)


@pytest.mark.slow
@pytest.mark.parametrize("contender", OWN, ids=lambda each: each.name)
def test_ours_moves_what_the_formula_says(contender):
    layout = Layout(1, RANKS, SIZE)
    for number, on_ranks in count(contender, layout, (1, 4)).items():
        assert on_ranks == [predicted(layout, number, *OFFLOADS[contender.name])] * RANKS


@pytest.mark.slow
@pytest.mark.parametrize("contender", PEERS, ids=lambda each: each.name)
def test_peers_move_more_with_every_micro_batch(contender):
    found = count(contender, Layout(1, RANKS, SIZE), (1, 4))
    shard = 4 * block_elements(SIZE) * BLOCKS / RANKS
    moved = {number: [(a / shard, b / shard) for a, b in on_ranks] for number, on_ranks in found.items()}
    if contender.name in RIGHT:
        for number, on_ranks in moved.items():
            assert on_ranks == [pytest.approx(RIGHT[contender.name](number))] * RANKS
    one, four = (max(loaded + stored for loaded, stored in moved[number]) for number in (1, 4))
    # Whoever keeps the whole model on the device gathers it once.
    assert four == one if "kept" in contender.name else four > 2 * one
