"""Layers draw the same numbers when a chunk is recomputed, and nothing else changes."""

import random

import numpy
import torch
from torch import nn

from ds_lgamp.integrations.deepspeed.random_sources import layer_sources
from ds_lgamp.runtime.random_state import Draws, RandomSource
from ds_lgamp.schedule.program import ProgramSpec, build_program
from tests.ranks import run_on_ranks
from tests.runtime.assembly import DEVICE, assemble, build_grid
from tests.runtime.models import Model, build_model, micro_batch


class RecordingDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.masks = []

    def forward(self, inputs):
        mask = (torch.rand_like(inputs) > 0.5).float()
        self.masks.append(mask)
        return inputs * mask


class DrawingNowAndThen(nn.Module):
    """Decides by its input, the same in both passes, and draws from another generator each time."""

    DRAWS = (random.random, numpy.random.standard_normal, lambda: torch.rand(()).item(), lambda: 0.5)

    def __init__(self):
        super().__init__()
        self.drawn = []

    def forward(self, inputs):
        draw = self.DRAWS[int(inputs.detach().abs().sum() * 1000) % len(self.DRAWS)]
        self.drawn.append((draw, draw()))
        return inputs * self.drawn[-1][1]


class SeedingItself(nn.Module):
    """Leaves every generator where it always leaves it."""

    def forward(self, inputs):
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        return inputs + torch.rand_like(inputs) + random.random() + numpy.random.rand()


def train_step(layers, bounds, micro_batches, sources=None):
    """One step on one rank, with the generators at seed 7; their next numbers."""
    spec = ProgramSpec((0,) * (len(bounds) - 1), "layered", micro_batches, micro_batches, zero_stage=0)
    assembled = assemble(build_grid(1, 1), spec, Model(layers, False), bounds, lambda: None)
    if sources is not None:
        assembled.executor.draws = Draws(sources)
    seed_all()
    with assembled.executor.batch(micro_batches, lambda index: micro_batch(0, index)):
        assembled.executor.run(build_program(spec)[0])
    return next_numbers()


def seed_all():
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)


def next_numbers():
    return torch.rand(4).tolist(), random.random(), random.gauss(0, 1), numpy.random.standard_normal(3).tolist()


def masks_of_a_step():
    model = build_model(2, tied=False)
    dropout = RecordingDropout()
    after = train_step([model.layers[0], dropout, model.layers[-1]], [0, 1, 3], 3)
    return dropout.masks, after[0]


def numbers_of_a_step():
    model = build_model(2, tied=False)
    first, second = DrawingNowAndThen(), DrawingNowAndThen()
    layers = [model.layers[0], first, second, model.layers[-1]]
    after = train_step(layers, [0, 2, 3, 4], 16, layer_sources(DEVICE))
    forward = first.drawn[:16] + second.drawn[:16]
    recomputed = first.drawn[16:] + second.drawn[16:]
    assert forward == recomputed
    kinds = {draw for draw, _ in forward}
    seed_all()
    for draw, _ in forward:
        draw()
    return len(kinds), after, next_numbers()


def numbers_after_seeding():
    model = build_model(2, tied=False)
    dropout = RecordingDropout()
    layers = [model.layers[0], SeedingItself(), dropout, model.layers[-1]]
    after = train_step(layers, [0, 2, 4], 3, layer_sources(DEVICE))
    masks = dropout.masks
    assert all(torch.equal(first, second) for first, second in zip(masks[:3], masks[3:]))
    SeedingItself()(torch.zeros_like(masks[0]))
    for mask in masks[:3]:
        torch.rand_like(mask)
    return after, next_numbers()


class CountingSource:
    """A generator whose state is a number, drawn by adding one."""

    def __init__(self):
        self.state, self.reads, self.writes = 0, 0, 0

    def read(self):
        self.reads += 1
        return self.state

    def write(self, state):
        self.writes += 1
        self.state = state

    def draw(self):
        self.state += 1
        return self.state


def visits(draws, source, drawing):
    """Two chunks, three micro-batches each, forward and backward; what was drawn by chunk and micro-batch."""
    drawn = {}
    for chunk in (0, 1):
        for index in range(3):
            draws.forward(chunk, index)
            drawn[chunk, index] = source.draw() if chunk in drawing else None
    for chunk in (1, 0):
        for index in range(3):
            with draws.again(chunk, index):
                again = source.draw() if chunk in drawing else None
            assert again == drawn[chunk, index]


def test_states_are_read_once_per_visit_where_nothing_draws():
    source = CountingSource()
    visits(Draws([RandomSource(source.read, source.write)]), source, drawing=())
    # Before the first visit, after each of the forwards, and at the beginning of each of the backwards.
    assert (source.reads, source.writes) == (1 + 2 + 2, 0)


def test_each_recomputation_draws_on_from_where_the_one_before_stopped():
    source = CountingSource()
    draws = Draws([RandomSource(source.read, source.write)])
    for drawing in ((0,), (1,), (0, 1)):
        before = source.state
        visits(draws, source, drawing)
        assert source.state == before + 3 * len(drawing)


def test_recomputation_repeats_the_masks_and_leaves_the_generator_alone():
    masks, after = run_on_ranks(1, masks_of_a_step)[0]
    assert len(masks) == 6
    forward, recomputed = masks[:3], masks[3:]
    assert all(torch.equal(first, second) for first, second in zip(forward, recomputed))
    assert not torch.equal(forward[0], forward[1])
    torch.manual_seed(7)
    for mask in forward:
        torch.rand_like(mask)
    assert after == torch.rand(4).tolist()


def test_layers_may_draw_from_any_generator_in_some_micro_batches_only():
    kinds, after, expected = run_on_ranks(1, numbers_of_a_step)[0]
    assert kinds == 4
    assert after == expected


def test_a_recomputed_layer_that_seeds_leaves_no_seed_behind():
    after, expected = run_on_ranks(1, numbers_after_seeding)[0]
    assert after == expected
