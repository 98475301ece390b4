"""When data end, every rank gets StopIteration at the same step, and training can go on with other data."""

import pytest
import torch.distributed as dist
from deepspeed.pipe import PipelineModule

from ds_lgamp.config import ConfigError
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.linear import batches, engine_of, linears, mean_square

BLOCK = {"layers_per_chunk": 1}


class Counting:
    """An iterator that counts how often it was asked."""

    def __init__(self, count):
        self.pulled = 0
        self._batches = batches(count)

    def __iter__(self):
        return self

    def __next__(self):
        self.pulled += 1
        return next(self._batches)


def module_of(layers, pipeline_ranks):
    with quiet():
        return PipelineModule(linears(layers), num_stages=pipeline_ranks, loss_fn=mean_square)


def steps_until_the_end(pipeline_ranks, lengths):
    """Trains and then evaluates until StopIteration, with a different amount of data on every rank.

    Returns the steps of both, and the loss of a step on fresh data.
    """
    engine = engine_of(module_of(5, pipeline_ranks), BLOCK)
    training = batches(lengths[dist.get_rank()])
    steps = 0
    with pytest.raises(StopIteration):
        while True:
            engine.train_batch(training)
            steps += 1
    fresh = batches(4)
    first = engine.train_batch(fresh).item()
    with pytest.raises(StopIteration):
        engine.eval_batch(batches(1 if dist.get_rank() == 0 else 9))
    second = engine.train_batch().item()
    return steps, first, second


def pulls_of_a_batch():
    """Runs five chunks on two or four ranks. Rank 0 owns the first and the last chunk."""
    counts = []
    for pipeline_ranks in (2, 4):
        engine = engine_of(module_of(5, pipeline_ranks), BLOCK)
        data = Counting(2)
        engine.train_batch(data)
        counts.append((engine.stage_id, data.pulled))
    return counts


def broken():
    """Yields data that raise an error on rank 0 only."""
    yield from batches(1)
    if dist.get_rank() == 0:
        raise OSError("the disk is gone")
    yield from batches(1)


def refilled():
    """Yields the same tensors again, with other values."""
    inputs, labels = next(batches(1))
    while True:
        yield inputs.mul_(2), labels


def complaints():
    """Returns the errors of data that are not data."""
    engine = engine_of(module_of(5, 4), BLOCK)
    told = []
    for data in (None, iter([3, 4]), iter([(1,), (2,)]), broken(), refilled()):
        with pytest.raises(ConfigError) as error:
            engine.train_batch(data)
        told.append(str(error.value))
    return told


def run_all():
    prepare_rank()
    return {
        "pipeline": steps_until_the_end(4, [7, 100, 100, 100]),
        "pipeline and data": steps_until_the_end(2, [9, 5, 8, 9]),
        "pulls": pulls_of_a_batch(),
        "complaints": complaints(),
    }


@pytest.fixture(scope="module")
def results():
    return run_on_ranks(4, run_all)


def test_the_shortest_data_of_a_rank_that_needs_some_end_the_run_everywhere(results):
    assert {rank["pipeline"][0] for rank in results} == {3}
    assert {rank["pipeline and data"][0] for rank in results} == {2}


def test_training_goes_on_with_fresh_data(results):
    for layout in ("pipeline", "pipeline and data"):
        assert len({rank[layout][1:] for rank in results}) == 1


def test_a_rank_with_both_ends_pulls_every_micro_batch_once_and_middle_ranks_none(results):
    for rank in results:
        for stage, pulled in rank["pulls"]:
            assert pulled == (2 if stage == 0 else 0)


def test_unusable_data_are_named_on_every_rank(results):
    for rank in results:
        missing, number, single, failing, refilled = rank["complaints"]
        assert "there are no data; pass data_iter to train_batch" in missing
        assert "a micro-batch is int; a pipeline takes pairs" in number
        assert "a micro-batch is tuple" in single
        assert failing == "the data of rank 0 failed: OSError: the disk is gone"
        assert "micro-batch 0 of 2 was changed when a later one was asked for" in refilled
