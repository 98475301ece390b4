"""``ds_lgamp.nonfinite`` with a model of transformers: the call that the script made is named."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils.logging import logger

import ds_lgamp
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.faulty import Said
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, configuration, initialize
from tests.integrations.transformers.models import make, micro_batch

LAYOUTS = {"pipeline": (2, 1), "data": (1, 3)}
"""Pipeline ranks and ZeRO stage, on two ranks."""


def train(pipeline_ranks, stage):
    """Spoils the second step. Returns what was said, whether the weights changed in each step, and the losses."""
    torch.manual_seed(1)
    model = make("GPT-2")
    block = {"pipeline_ranks": pipeline_ranks, "nonfinite": "skip"}
    engine = initialize(model, configuration(stage, block))
    said, changed, losses = Said(logger), [], []
    for step in range(3):
        shards = [unit.storage.shard.clone() for unit in engine.optimizer.partition.units]
        for number in range(MICRO_BATCHES):
            batch = micro_batch(step, dist.get_rank(), number)
            if step == 1 and dist.get_rank() == 1 and number == 1:
                inputs = batch.pop("input_ids")
                batch["inputs_embeds"] = torch.full((*inputs.shape, model.config.n_embd), float("nan"))
            elif step == 1:
                batch["inputs_embeds"] = torch.ones(*batch.pop("input_ids").shape, model.config.n_embd)
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
        losses.append(loss.isfinite().item())
        after = [unit.storage.shard for unit in engine.optimizer.partition.units]
        changed.append(not all(map(torch.equal, shards, after)))
    logger.removeHandler(said)
    return said.take(), changed, losses, engine.skipped_steps


def train_all():
    prepare_rank()
    ds_lgamp.install()
    return {name: train(*layout) for name, layout in LAYOUTS.items()}


@pytest.fixture(scope="module")
def ranks():
    return run_on_ranks(2, train_all)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_call_is_named_and_the_step_changes_nothing(ranks, layout):
    lines = [line for rank in ranks for line in rank[layout][0]]
    assert len(lines) == 1, lines
    assert lines[0].startswith("ds_lgamp: step 2 is not finite")
    assert (
        "is in the inputs of call 1 of rank 1, on rank 0" in lines[0]
        if layout == "pipeline"
        else "on rank 1" in lines[0]
    )
    for rank in ranks:
        _, changed, losses, skipped = rank[layout]
        assert changed == [True, False, True] and skipped == 1
        assert losses[0] and losses[2]
