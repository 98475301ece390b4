"""``python -m benchmarks run recomputation``: what its peers recompute, and how its targets compare."""

import pytest
import torch
from torch import nn

from benchmarks import IN_PARTS, recomputation
from benchmarks.contenders.door import HEAD_WIDTH
from benchmarks.contenders.recomputing import EVERY, recompute
from benchmarks.model import ModelSize, build_blocks
from benchmarks.recomputation import FULL, HALF, LIMIT, MICRO_BATCHES, MODELS, NONE, ONE_BY_ONE, Held
from benchmarks.record import OURS, PART, Record
from benchmarks.training import Duration
from tests.runtime.test_host_work import Operators

BLOCKS = 5
SIZE = ModelSize(blocks=BLOCKS, width=32, sequence=4)


def trained(kind):
    """Returns the operators of a training step, and the gradients."""
    blocks = build_blocks(SIZE, range(BLOCKS), recompute=False)
    recompute(blocks, kind)
    with Operators() as operators:
        nn.Sequential(*blocks)(torch.ones(1, SIZE.sequence, SIZE.width)).sum().backward()
    return operators.counts, [parameter.grad for block in blocks for parameter in block.parameters()]


def test_peers_recompute_blocks_every_second_one_all_but_products_or_nothing():
    counts, gradients = zip(*map(trained, EVERY))
    for own in gradients:
        assert all(map(torch.equal, own, gradients[-1]))
    norms, products = ([each[name] for each in counts] for name in ("native_layer_norm", "addmm"))
    # Two norms and four products in a block. A recomputation stops ahead of the last product.
    assert dict(zip(EVERY, norms)) == {"full": 18, "operators": 18, "every second": 14, "none": 10}
    assert dict(zip(EVERY, products)) == {"full": 32, "operators": 20, "every second": 26, "none": 20}


def steps(**walls):
    return {name: [Duration(wall, wall) for wall in each] for name, each in walls.items()}


def test_steps_are_compared_with_less_memory_and_with_peers_that_take_no_less():
    seconds = {FULL: 2.0, HALF: 1.6, NONE: 1.0, ONE_BY_ONE: 1.1, "FSDP2, none": 1.2, "FSDP2, full": 1.9}
    peaks = {FULL: 10, HALF: 20, NONE: 30, ONE_BY_ONE: 12, "FSDP2, none": 11, "FSDP2, full": 9}
    record = Record(recomputation.NAME, {})
    durations = steps(**{name: [each, 2 * each] for name, each in seconds.items()})
    recomputation.aim(record, MODELS[0], durations, {name: Held(1, peak) for name, peak in peaks.items()})
    longer, left, beside = record.targets
    assert (longer.value, longer.limit) == (pytest.approx(0.8), LIMIT), "each is compared in its round"
    assert (left.value, left.met) == (pytest.approx(0.6), False)
    # Nothing of ours fits into the 9 of the last peer.
    assert "FSDP2, none" in beside.text and beside.value == pytest.approx(2.0 / 1.2)
    assert OURS not in beside.text


def test_each_model_may_be_measured_by_itself():
    assert IN_PARTS[recomputation.NAME] == tuple(model.name for model in MODELS)


@pytest.mark.slow
def test_the_record_has_every_contender_and_budgets_hold():
    """But for what a call of the Llama hands to all blocks: cosines, sines and positions of every micro-batch. On an
    accelerator, the first batch measures these too."""
    size = ModelSize(blocks=3, width=32, sequence=16, vocabulary=64)
    record = recomputation.run(size, compiler_budgets=(), repetitions=1)
    for model in MODELS:
        rows = [row for row in record.rows if row.config[PART] == model.name]
        assert len([row for row in rows if row.metric == "step"]) == 6 + len(EVERY)
        peaks = {row.contender: row.median for row in rows if row.metric == "peak"}
        budgets = {row.contender: row.median for row in rows if row.metric == "budget"}
        of_calls = MICRO_BATCHES * size.sequence * (2 * HEAD_WIDTH * 4 + 8) if model.name == "Llama" else 0
        assert len(budgets) == 3
        assert all(peaks[name] <= budget * 1.01 + of_calls for name, budget in budgets.items())
        assert peaks[FULL] < peaks[HALF] < peaks[NONE]
