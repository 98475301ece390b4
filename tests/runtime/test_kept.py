"""Autograd may keep what it saved of any chunk and micro-batch, and a step stays the same to the bit."""

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

from ds_lgamp.runtime.batch import BatchState
from ds_lgamp.runtime.meter import ChunkMeter
from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.placement import place_chunks, split_balanced
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.validate import validate
from testing.ranks import run_on_ranks
from tests.runtime.assembly import assemble, build_grid, gathered
from tests.runtime.models import WIDTH, Block, Embedding, Model, Recording, micro_batch
from tests.slow import slow_except

MICRO_BATCHES = 4
ORDERS = [("layered", 2, 4), ("layered", 3, 2), ("layered", 2, 1), ("interleaved_1f1b", 2, 4), ("1f1b", 1, 4)]
ORDERS += [("gpipe", 1, 4)]
"""Schedule, chunks per rank and micro-batches of a group."""


class Changing(nn.Module):
    """Draws, changes its input in place, counts its calls, and normalises with statistics that every forward moves."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.calls = 0

    def forward(self, hidden):
        self.calls += 1
        scaled = self.dropout(torch.tanh(self.inner(hidden.mul_(1.5)))) * (1 + self.calls % 3)
        return hidden + self.norm(scaled.flatten(0, 1)).view_as(hidden)


def model():
    torch.manual_seed(0)
    body = [kind() for kind in (Block, Changing) * 5]
    return Model([Embedding(), *body, nn.Linear(WIDTH, 11)], tied=False)


def specs(pipeline_ranks):
    """Yields every schedule, at a stage that keeps weights and with stored inputs, or at one that frees weights."""
    for (schedule, per_rank, group), (stage, stores) in product(ORDERS, ((0, True), (3, False))):
        if schedule == "interleaved_1f1b" and MICRO_BATCHES % pipeline_ranks:
            continue  # This schedule takes a multiple of the pipeline ranks only.
        placement = place_chunks("modular", pipeline_ranks * per_rank, pipeline_ranks)
        yield ProgramSpec(placement, schedule, MICRO_BATCHES, group, stage, stores_inputs=stores)


def state_after_steps(grid, spec, meter=None):
    """Returns the gradients of two steps and the buffers and counters after them."""
    built, gradients = model(), []

    def apply_step():
        gradients.append(gathered(assembled.partition, lambda unit: unit.reduction.shard_gradient.clone()))

    bounds = split_balanced([1] * len(built.layers), spec.chunks)
    assembled = assemble(grid, spec, built, bounds, apply_step)
    assembled.partition.release_all()
    assembled.executor.meter = meter
    program = build_program(spec)
    validate(spec, program)
    torch.manual_seed(7)
    for step in range(2):
        actions = program[grid.pipeline_rank]
        parts = {"program": actions, "split_chunks": spec.split_chunks}
        batch = BatchState(MICRO_BATCHES, lambda index, step=step: micro_batch(step, index), **parts)
        with assembled.executor.run_batch(batch):
            assembled.executor.run(actions)
    layers = [layer for layer in built.layers if isinstance(layer, Changing)]
    state = [torch.rand(3), *(buffer for layer in layers for buffer in layer.buffers())]
    return gradients, state, [layer.calls for layer in layers]


def pairs_of(spec, draw):
    """Draws which pairs are kept: few, half or most of them."""
    share = draw.choice((0.1, 0.5, 0.9))
    pairs = product(range(spec.chunks), range(spec.micro_batches))
    return frozenset(pair for pair in pairs if draw.random() < share)


def assert_same(found, expected, spec):
    """Compares what :func:`state_after_steps` has returned for ``spec``."""
    for step, gradients in enumerate(found[0]):
        for name, gradient in gradients.items():
            assert torch.equal(gradient, expected[0][step][name]), (spec, step, name)
    assert all(map(torch.equal, found[1], expected[1])), spec
    assert found[2] == expected[2], spec


def compare(pipeline_ranks, tries):
    """Compares with the step that recomputes everything, on this rank. Returns how many programs kept something."""
    grid, draw, kept = build_grid(pipeline_ranks, 1), random.Random(5), 0
    for spec in specs(pipeline_ranks):
        expected = state_after_steps(grid, spec)
        for _ in range(tries):
            other = replace(spec, kept=pairs_of(spec, draw))
            found = state_after_steps(grid, other)
            assert_same(found, expected, other)
            kept += bool(other.kept)
    return kept


@pytest.mark.parametrize(
    ("pipeline_ranks", "tries"), slow_except([(2, 1)], [(2, 1), (1, 20), (2, 10), (3, 5)], several=True)
)
def test_any_set_of_kept_pairs_trains_to_the_same_bits(pipeline_ranks, tries):
    """With dropout, batch norms, counters, and layers that change their input in place."""
    for kept in run_on_ranks(pipeline_ranks, compare, pipeline_ranks, tries):
        assert kept > 0


def measured():
    """Returns, on each rank, the state after steps without and with a meter, and what it measured."""
    grid = build_grid(2, 1)
    spec = ProgramSpec((0, 1, 0, 1), "layered", MICRO_BATCHES, MICRO_BATCHES, 0)
    meter = ChunkMeter()
    return state_after_steps(grid, spec), state_after_steps(grid, spec, meter), meter.chunks, meter.inputs


def test_measuring_changes_nothing_and_tells_both_ways_of_every_chunk():
    for rank, (expected, found, chunks, inputs) in enumerate(run_on_ranks(2, measured)):
        for step in range(2):
            assert all(torch.equal(found[0][step][name], each) for name, each in expected[0][step].items())
        assert all(map(torch.equal, found[1], expected[1])) and found[2] == expected[2]
        hidden = 4 * 4 * 16 * WIDTH
        assert sorted(chunks) == sorted(inputs) == [rank, rank + 2]
        assert inputs[2 + rank] == hidden
        assert all(both.kept.saved > hidden and both.backward > both.kept.backward for both in chunks.values())


class Watched(Recording):
    """Notes the modes of the forwards that it sees."""

    def forward(self, hidden):
        self.note(hidden.shape[0])
        return hidden


def forwards_of(lengths):
    """Returns how often a program that keeps everything computes a forward for micro-batches of these lengths."""
    from tests.runtime.one_rank import one_rank

    watched = Watched()
    executor = one_rank([[watched, nn.Linear(WIDTH, WIDTH)], [nn.Linear(WIDTH, 1), torch.mean]])
    executor.meter = ChunkMeter()
    spec = ProgramSpec((0, 0), "layered", len(lengths), len(lengths), 0, kept=frozenset({(0, 0), (0, 1), (0, 2)}))
    (actions,) = build_program(spec)
    inputs = [torch.ones(length, WIDTH) for length in lengths]
    batch = BatchState(len(lengths), lambda index: (inputs[index], None), program=actions)
    computes = [action for action in actions if action.kind in (Kind.FORWARD, Kind.BACKWARD)]
    with executor.run_batch(batch):
        executor.run(computes)
    return watched.drawn


def test_an_input_that_is_longer_than_all_before_is_recomputed_and_measured_whatever_the_program_says():
    ((first, second),) = run_on_ranks(1, both_lengths)
    assert first == [3, 3, 3, 3], "the first of three equal ones computes once more"
    assert sorted(second) == [2, 2, 3, 4, 4], "and each that is longer than all before"


def both_lengths():
    return forwards_of([3, 3, 3]), forwards_of([2, 4, 3])
