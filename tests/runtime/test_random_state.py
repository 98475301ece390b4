"""Layers draw the same numbers when a chunk is recomputed, and recomputation changes nothing else."""

import random

import numpy
import pytest
import torch
from torch import nn

from ds_lgamp.integrations.deepspeed.model.recomputation import layer_sources
from ds_lgamp.runtime.batch import BatchState
from ds_lgamp.runtime.recompute import Draws, RandomSource
from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import ProgramSpec
from testing.ranks import run_on_ranks
from tests.runtime.assembly import DEVICE, assemble, build_grid
from tests.runtime.models import Model, Recording, build_model, micro_batch
from tests.runtime.one_rank import all_recomputed


class RecordingDropout(Recording):
    def forward(self, inputs):
        mask = (torch.rand_like(inputs) > 0.5).float()
        self.note(mask)
        return inputs * mask


class DrawingNowAndThen(Recording):
    """Draws from another generator each time. The input selects the generator, so both passes select the same one."""

    DRAWS = (random.random, numpy.random.standard_normal, lambda: torch.rand(()).item(), lambda: 0.5)

    def forward(self, inputs):
        draw = self.DRAWS[int(inputs.detach().abs().sum() * 1000) % len(self.DRAWS)]
        self.note((draw, draw()))
        # A tanh saves its result, so the number is needed again.
        return torch.tanh(inputs * self.drawn[-1][1])


class SeedingItself(nn.Module):
    """Leaves every generator in the same state each time."""

    def forward(self, inputs):
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        return inputs + torch.rand_like(inputs) + random.random() + numpy.random.rand()


def train_step(layers, bounds, micro_batches, sources=None, steps=1, turns_at_once=False):
    """Runs steps on one rank, with the generators at seed 7. Returns the next numbers of the generators."""
    spec = ProgramSpec((0,) * (len(bounds) - 1), "layered", micro_batches, micro_batches, zero_stage=0)
    assembled = assemble(build_grid(1, 1), spec, Model(layers, False), bounds, lambda: None)
    if sources is not None:
        assembled.executor.draws = Draws(sources)
    seed_all()
    (program,) = build_program(spec)
    if not turns_at_once:
        program = all_recomputed(program)
    for _ in range(steps):
        batch = BatchState(micro_batches, lambda index: micro_batch(0, index), program=program)
        with assembled.executor.run_batch(batch):
            assembled.executor.run(program)
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
    after = train_step([model.layers[0], dropout, model.layers[-1]], [0, 2, 3], 3)
    return dropout.drawn, after[0]


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
    forward, recomputed = dropout.drawn[::2], dropout.drawn[1::2]
    assert all(torch.equal(first, second) for first, second in zip(forward, recomputed))
    SeedingItself()(torch.zeros_like(forward[0]))
    for mask in forward:
        torch.rand_like(mask)
    return after, next_numbers()


class CountingSource:
    """A generator whose state is a number. A draw adds one."""

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


class Drawer:
    """Runs forwards and backwards of chunks that draw or do not draw."""

    def __init__(self):
        self.source = CountingSource()
        self.draws = Draws([RandomSource("test", self.source.read, self.source.write, self.source.write)])
        self.drawn = {}

    def forward(self, chunk, index, count=1):
        self.draws.forward(chunk, index)
        self.drawn[chunk, index] = [self.source.draw() for _ in range(count)]

    def backward(self, chunk, index, count=1):
        with self.draws.again(chunk, index):
            again = [self.source.draw() for _ in range(count)]
        assert again == self.drawn[chunk, index][:count]

    def batch(self, drawing):
        """Runs a layered batch of two chunks and three micro-batches."""
        for chunk in (0, 1):
            for index in range(3):
                self.forward(chunk, index, chunk in drawing)
        for chunk in (1, 0):
            for index in range(3):
                self.backward(chunk, index, chunk in drawing)


def test_states_are_read_once_per_visit_where_the_last_one_drew_nothing():
    drawer = Drawer()
    drawer.batch(drawing=())
    drawer.source.reads = drawer.source.writes = 0
    drawer.batch(drawing=())
    # Reads before the first visit, after each of the forwards, and at the beginning of each of the backwards.
    assert (drawer.source.reads, drawer.source.writes) == (1 + 2 + 2, 0)


def test_a_chunk_may_begin_and_cease_to_draw_in_any_batch():
    drawer = Drawer()
    for drawing in ((), (0,), (1,), (0, 1), (), (1,)):
        before = drawer.source.state
        drawer.batch(drawing)
        assert drawer.source.state == before + 3 * len(drawing)


def test_a_layer_that_draws_at_its_first_call_only_moves_nobody_elses_draws():
    drawer = Drawer()
    for index in range(3):
        drawer.forward(0, index, count=2 if index == 0 else 1)
    drawer.backward(0, 0, count=1)
    drawer.backward(0, 1)
    drawer.backward(0, 2)


def test_a_chunk_that_leaves_a_generator_as_it_found_it_leaves_no_seed_behind():
    drawer = Drawer()
    source, draws = drawer.source, drawer.draws

    def seed_and_draw():
        source.state = 100
        return source.draw()

    for _ in range(3):
        seed_and_draw()
        draws.forward(0, 0)
        seed_and_draw()
        drawer.forward(1, 0)
        state = source.state
        drawer.backward(1, 0)
        with draws.again(0, 0):
            assert seed_and_draw() == 101
        assert source.state == state == 102


def test_only_one_that_begins_to_draw_has_to_draw_all_of_it_again():
    drawer = Drawer()
    drawer.batch(drawing=())
    for count in (0, 2):
        drawer.forward(0, 0, count)
        with drawer.draws.again(0, 0) as completely:
            assert completely == (count > 0)
            assert [drawer.source.draw() for _ in range(count)] == drawer.drawn[0, 0]


def test_one_that_begins_to_draw_and_not_alike_in_both_passes_is_refused():
    drawer = Drawer()
    drawer.batch(drawing=())
    for index in range(2):
        drawer.forward(0, index)
    drawer.backward(0, 0)
    with pytest.raises(RuntimeError, match="chunk 0 drew other random numbers when it was recomputed"):
        drawer.backward(0, 1, count=0)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_forwards_and_backwards_may_alternate(schedule):
    placement = (0, 1) if schedule == "1f1b" else (0, 1, 0, 1)
    program = build_program(ProgramSpec(placement, schedule, 6, 6, zero_stage=0))[0]
    drawer = Drawer()
    for drawing in ((0, 2), (), (0,), (2,)):
        for kind, chunk, index, *_ in program:
            if kind is Kind.FORWARD:
                drawer.forward(chunk, index, chunk in drawing)
            elif kind is Kind.BACKWARD:
                drawer.backward(chunk, index, chunk in drawing)


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


class DrawingLate(RecordingDropout):
    """Draws from its fourth forward on."""

    forwards = 0

    def forward(self, inputs):
        self.forwards += 1
        return super().forward(inputs) if self.forwards > 3 else inputs


def masks_of_a_chunk_that_turns_at_once():
    """In the second step the first chunk's generators are not read between its forwards, because it left them
    unchanged."""
    model, late = build_model(2, tied=False), DrawingLate()
    train_step([model.layers[0], model.layers[-1], late], [0, 1, 3], 3, steps=2, turns_at_once=True)
    return late.drawn


def test_a_chunk_that_turns_at_once_draws_once_and_no_other_chunk_repeats_it():
    (masks,) = run_on_ranks(1, masks_of_a_chunk_that_turns_at_once)
    assert len(masks) == 3, "a chunk that turns at once is not recomputed"
