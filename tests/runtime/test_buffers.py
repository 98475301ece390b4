"""Buffers that forwards change hold what every forward left in them, although chunks are computed again."""

import torch
from torch import nn

from tests.runtime.one_rank import one_rank, run


class Summing(nn.Module):
    """Adds its input to a buffer and scales it by that."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("total", torch.zeros(()))

    def forward(self, inputs):
        self.total += inputs.sum().detach()
        return inputs * self.weight * self.total.clone()


def train(recompute):
    """Runs two chunks in a 1F1B order, where F0.2 follows B0.0. Returns their layers."""
    layers = [Summing(), Summing()]
    order = "F0.0 F0.1 F1.0 B1.0 B0.0 F0.2 F1.1 B1.1 B0.1 F1.2 B1.2 B0.2"
    run(
        one_rank([[layer] for layer in layers]),
        [torch.tensor([float(2**index)]) for index in range(3)],
        order,
        recompute,
    )
    return layers


def test_forwards_between_backwards_go_on_from_the_last_forward():
    """B0.0 computes F0.0 again, before F0.2."""
    # Chunk 0 sums 1, 2 and 4. Its results are 1 * 1, 2 * 3 and 4 * 7.
    assert [layer.total.item() for layer in train(recompute=True)] == [7, 35]


def test_a_recomputation_finds_the_buffers_as_the_forward_did():
    gradients = [[layer.weight.grad.item() for layer in train(recompute)] for recompute in (True, False)]
    assert gradients[0] == gradients[1]
