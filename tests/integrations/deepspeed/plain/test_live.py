"""A model of transformers goes on from its live state, with the losses of a run that did not stop."""

import pytest
import torch
import torch.distributed as dist

import ds_lgamp
from ds_lgamp.checkpoint.errors import CheckpointError
from ds_lgamp.integrations.deepspeed.engine.ending import finish_engines
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, configuration, initialize
from tests.integrations.transformers.models import make, micro_batch

CASES = [(1, 0), (2, 3)]
"""Pipeline ranks and ZeRO stage, on two ranks."""
STOPPED, STEPS = 2, 4


def engine_of(pipeline_ranks, stage, folder):
    torch.manual_seed(1)
    block = {"pipeline_ranks": pipeline_ranks, "live_checkpoint": str(folder / "live")}
    return initialize(make("GPT-2"), configuration(stage, block))


def train(engine, until):
    """Returns the losses of the steps up to ``until``."""
    told = []
    while engine.global_steps < until:
        step = engine.global_steps
        for number in range(MICRO_BATCHES):
            loss = engine(**micro_batch(step, dist.get_rank(), number)).loss
            engine.backward(loss)
            engine.step()
            told.append(loss.item())
    finish_engines()
    return told


def go_on(folder, cases):
    """Returns, for each case, the step at which a second engine goes on, and whether its losses are those of the first
    one, which goes on as well."""
    prepare_rank()
    ds_lgamp.install()
    found = []
    for case in cases:
        own = folder / str(case)
        first = engine_of(*case, own)
        train(first, STOPPED)
        second = engine_of(*case, own)
        second.load_checkpoint(str(own / "checkpoints"))
        found.append((second.global_steps, train(second, STEPS) == train(first, STEPS)))
    return found


def come_back_from_stock(folder):
    """A run without a block has gone on where a live state was left. Returns the error, and what ``latest`` names."""
    prepare_rank()
    ds_lgamp.install()
    checkpoints = folder / "checkpoints"
    train(engine_of(1, 0, folder), STOPPED)
    if dist.get_rank() == 0:
        (checkpoints / "stock").mkdir(parents=True)
        (checkpoints / "stock" / "mp_rank_00_model_states.pt").touch()
        (checkpoints / "latest").write_text("stock")
    dist.barrier()
    with pytest.raises(CheckpointError) as error:
        engine_of(1, 0, folder).load_checkpoint(str(checkpoints))
    return str(error.value), (checkpoints / "latest").read_text()


def test_no_state_takes_the_place_of_a_later_checkpoint_of_stock_deepspeed(tmp_path):
    for said, latest in run_on_ranks(2, come_back_from_stock, tmp_path):
        assert "stock DeepSpeed wrote it: convert it" in said and latest == "stock"


def test_a_run_goes_on_from_the_state_of_its_last_step(tmp_path):
    assert run_on_ranks(2, go_on, tmp_path, CASES) == [[(STOPPED, True)] * len(CASES)] * 2
