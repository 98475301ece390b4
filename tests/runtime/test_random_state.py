"""Dropout draws the same mask when a chunk is recomputed."""

import torch
from torch import nn

from ds_lgamp.runtime.random_state import default_sources, read_states
from ds_lgamp.schedule.program import ProgramSpec, build_program
from tests.ranks import run_on_ranks
from tests.runtime.assembly import assemble, build_grid
from tests.runtime.models import Model, build_model, micro_batch


class RecordingDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.masks = []

    def forward(self, inputs):
        mask = (torch.rand_like(inputs) > 0.5).float()
        self.masks.append(mask)
        return inputs * mask


def masks_of_a_step():
    model = build_model(2, tied=False)
    dropout = RecordingDropout()
    layers = [model.layers[0], dropout, model.layers[-1]]
    spec = ProgramSpec((0, 0), "layered", 3, 3, zero_stage=0)
    assembled = assemble(build_grid(1, 1), spec, Model(layers, False), [0, 1, 3], lambda: None)
    torch.manual_seed(7)
    with assembled.executor.batch(3, lambda index: micro_batch(0, index)):
        assembled.executor.run(build_program(spec)[0])
    return dropout.masks, torch.rand(4)


def test_a_state_that_did_not_change_is_stored_once():
    sources = default_sources(torch.device("cpu"))
    first = read_states(sources)
    assert read_states(sources, first)[0] is first[0]
    torch.rand(1)
    assert read_states(sources, first)[0] is not first[0]


def test_recomputation_repeats_the_masks_and_leaves_the_generator_alone():
    masks, after = run_on_ranks(1, masks_of_a_step)[0]
    assert len(masks) == 6
    forward, recomputed = masks[:3], masks[3:]
    assert all(torch.equal(first, second) for first, second in zip(forward, recomputed))
    assert not torch.equal(forward[0], forward[1])
    torch.manual_seed(7)
    for mask in forward:
        torch.rand_like(mask)
    assert torch.equal(after, torch.rand(4))
