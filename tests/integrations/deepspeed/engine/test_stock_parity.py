"""At P2 W2 a script gets from a block what it gets from stock DeepSpeed: losses with the same dropout masks, learning
rates, and batch functions."""

import deepspeed
import pytest

import ds_lgamp
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.models import Training, pipeline_module
from tests.integrations.deepspeed.running import Layout, batches, json_config

ADAM = {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1, "torch_adam": True}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_min_lr": 0.001, "warmup_max_lr": 0.01}}


def train_with_json(block, stage, scheduler):
    """Trains an engine whose optimizer and scheduler come from the configuration.

    A stored iterator yields transposed batches, and a batch function transposes them back.
    """
    ds_lgamp.install()
    training = Training(tied=True, tuples=False, dropout=0.2, clipping=0.3)
    config = json_config(training, Layout(2, 2, stage, block)) | {"optimizer": ADAM, "scheduler": scheduler}
    with quiet():
        module = pipeline_module(training, 2)
        engine, optimizer, _, lr_scheduler = deepspeed.initialize(model=module, config=config)
    assert engine.optimizer is optimizer and engine.lr_scheduler is lr_scheduler
    engine.set_batch_fn(lambda batch: (batch[0].T, batch[1]))
    losses, rates = [], []
    for step in range(6):
        engine.set_dataiterator((tokens.T, labels) for tokens, labels in batches(step, engine))
        losses.append(engine.train_batch().item())
        rates.append(engine.get_lr()[0])
        if step == 2:
            losses.append(engine.eval_batch((tokens.T, labels) for tokens, labels in batches(99, engine)).item())
    return losses, rates, engine.global_steps


def compare():
    prepare_rank()
    results = []
    for scheduler in (WARMUP, {"type": "WarmupCosineLR", "params": {"total_num_steps": 8, "warmup_num_steps": 2}}):
        stock = train_with_json(None, 1, scheduler)
        results += [(stock, train_with_json({"micro_batch_group": 2}, stage, scheduler)) for stage in (1, 3)]
    return results


@pytest.mark.slow
def test_optimizer_and_scheduler_of_the_configuration_step_as_in_stock():
    for rank in run_on_ranks(4, compare):
        for stock, layered in rank:
            assert layered[0] == pytest.approx(stock[0], rel=1e-5)
            assert layered[1:] == stock[1:]


def train_with_torch_scheduler():
    """Trains with torch's scheduler. Stock DeepSpeed passes it a wrapper, which it refuses. The block passes it the
    optimizer."""
    prepare_rank()
    _, rates, _ = train_with_json({}, 3, {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}})
    return rates


def test_a_torch_scheduler_of_the_configuration_sets_the_rates():
    assert run_on_ranks(4, train_with_torch_scheduler)[3] == pytest.approx(
        [0.01, 0.005, 0.005, 0.0025, 0.0025, 0.00125]
    )
