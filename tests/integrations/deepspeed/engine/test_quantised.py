"""What travels rounded trains as one process into which the same rounding is put by hand."""

import pytest
import torch

from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.rounding import train_rounded
from tests.integrations.deepspeed.models import Training
from tests.integrations.deepspeed.running import Layout, train
from tests.runtime.assembly import gathered

TRAINING = Training(blocks=4, momentum=0.9, decay=0.01, clipping=0.5, steps=4)
WEIGHTS, GRADIENTS = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}


def train_cases(cases):
    prepare_rank()
    for layout, weights, gradients in cases:
        train_as_by_hand(layout, weights, gradients)


def train_as_by_hand(layout, weights, gradients):
    run = train(TRAINING, layout)
    losses, norms, parameters = train_rounded(TRAINING, layout.data_ranks, weights, gradients)
    assert run.losses == pytest.approx(losses, rel=1e-6), layout
    assert run.norms == pytest.approx(norms, rel=1e-6), layout
    for name, value in gathered(run.engine.optimizer.partition, lambda unit: unit.storage.shard).items():
        torch.testing.assert_close(value, parameters[name].detach(), rtol=1e-6, atol=1e-6, msg=f"{layout} {name}")


def layouts(ranks):
    for pipeline_ranks in (1, 2):
        data_ranks = ranks // pipeline_ranks
        if data_ranks == 1:
            continue
        for block in ({"chunks_per_rank": 3}, {"chunks_per_rank": 2, "resident_chunks": 1, "micro_batch_group": 4}):
            yield Layout(pipeline_ranks, data_ranks, 3, block, zero=WEIGHTS), 8, None
            for stage in (1, 2, 3):
                for bits in (8, 4):
                    bits_of = {**block, "quantised_gradient_bits": bits}
                    yield Layout(pipeline_ranks, data_ranks, stage, bits_of, zero=GRADIENTS), None, bits
            both = {**block, "quantised_gradient_bits": 4}
            yield Layout(pipeline_ranks, data_ranks, 3, both, zero=WEIGHTS | GRADIENTS), 8, 4


def test_two_ranks_train_as_one_process_that_rounds_by_hand():
    cases = [
        (Layout(1, 2, 3, {"chunks_per_rank": 3}, zero=WEIGHTS), 8, None),
        (Layout(1, 2, 2, {"chunks_per_rank": 3}, zero=GRADIENTS), None, 8),
        (Layout(1, 2, 3, {"chunks_per_rank": 2, "quantised_gradient_bits": 4}, zero=WEIGHTS | GRADIENTS), 8, 4),
    ]
    run_on_ranks(2, train_cases, cases)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", (2, 4))
def test_every_layout_trains_as_one_process_that_rounds_by_hand(ranks):
    run_on_ranks(ranks, train_cases, list(layouts(ranks)))
