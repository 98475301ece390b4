"""The benchmark of an unedited script with a model of transformers: its counts are exact."""

import pytest

from benchmarks.door import Training, count_script, deviations_from_formula
from benchmarks.model import ModelSize

BLOCKS = 4
TINY = ModelSize(blocks=BLOCKS, width=32, sequence=8, vocabulary=64)
STOCK, BLOCK = Training(3, None), Training(3, 1)
SHARDS_GRADIENTS = Training(2, 1)


@pytest.mark.slow
def test_gathers_and_reductions_grow_with_accumulation_in_stock_deepspeed_only():
    trainings = [STOCK, BLOCK, SHARDS_GRADIENTS]
    few, many = (count_script(2, TINY, micro_batches, trainings) for micro_batches in (1, 3))
    for counted in (few, many):
        # Two chunks are resident, so that the last two of the forward pass need no second gather.
        assert [(rank.gathers, rank.reductions) for rank in counted[BLOCK]] == [(2 * BLOCKS - 2, BLOCKS)] * 2
        assert [(rank.gathers, rank.reductions) for rank in counted[SHARDS_GRADIENTS]] == [(BLOCKS, BLOCKS)] * 2
    assert few[BLOCK] == many[BLOCK]
    for one, three in zip(few[STOCK], many[STOCK]):
        assert three.gathers == 3 * one.gathers > 3 * (2 * BLOCKS - 2)
        assert three.reductions == 3 * one.reductions >= 3 * BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_counts_are_those_of_the_formula_in_every_layout(micro_batches):
    for training, on_ranks in count_script(4, TINY, micro_batches).items():
        assert deviations_from_formula(training, 4, TINY, micro_batches, on_ranks) == 0, training
