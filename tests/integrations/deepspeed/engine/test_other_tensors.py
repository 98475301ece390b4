"""A script gives parameters other tensors (``parameter.data = ...``). The next batch and the next checkpoint take their
values over."""

from itertools import product

import torch

from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.linear import ONE_LAYER_PER_CHUNK, batches, build, engine_of, linears


def other_tensors_have_other_values(directory):
    """Halves all parameters after a step, in place or by other tensors, at every stage that keeps them. Returns the
    losses of the next evaluation and step, and those of a run that goes on from a checkpoint of the halves."""
    prepare_rank()
    found = []
    for stage, halve in product((0, 1, 2), (in_place, by_other_tensors)):
        engine = engine_of(build(linears(4)), ONE_LAYER_PER_CHUNK, stage)
        engine.train_batch(batches(2))
        for parameter in engine.module.parameters():
            halve(parameter)
        tag = f"{stage} {halve.__name__}"
        engine.save_checkpoint(directory, tag)
        losses = evaluated_and_trained(engine)
        engine = engine_of(build(linears(4)), ONE_LAYER_PER_CHUNK, stage)
        engine.load_checkpoint(directory, tag)
        found.append([losses, evaluated_and_trained(engine)])
    return found


def in_place(parameter):
    with torch.no_grad():
        parameter.mul_(0.5)


def by_other_tensors(parameter):
    parameter.data = parameter.data * 0.5


def evaluated_and_trained(engine):
    return [engine.eval_batch(batches(2)).item(), *(engine.train_batch(batches(2)).item() for _ in range(2))]


def test_values_of_other_tensors_count_as_those_written_in_place(tmp_path):
    for found in run_on_ranks(4, other_tensors_have_other_values, tmp_path):
        for place, other in zip(found[::2], found[1::2]):
            assert place[0] == place[1] == other[0] == other[1]
