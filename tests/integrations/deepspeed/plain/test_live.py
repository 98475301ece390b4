"""A model of transformers goes on from its live state, with the losses of a run that did not stop."""

import pytest
import torch
import torch.distributed as dist

import ds_lgamp
from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.live_recovery import publish_alone
from ds_lgamp.checkpoint.whole import read_whole
from ds_lgamp.integrations.user_script import finish_engines
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain.states import adapted
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, configuration, initialize
from tests.integrations.transformers.models import make, micro_batch

CASES = [(1, 0), (2, 3)]
"""Pipeline ranks and ZeRO stage, on two ranks."""
STOPPED, STEPS = 2, 4


def engine_of(pipeline_ranks, stage, folder, model=None):
    torch.manual_seed(1)
    block = {"pipeline_ranks": pipeline_ranks, "live_checkpoint": str(folder / "live")}
    return initialize(make("GPT-2") if model is None else model, configuration(stage, block))


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


def publish_an_adapter(folder):
    """Publishes in one process what two pipeline ranks have left. Both have the embedding, which is the head as well
    and does not train. Returns the names of the parameters there, and whether the embedding is that of the run."""
    prepare_rank()
    ds_lgamp.install()
    model = adapted("GPT-2")
    embedding = model.get_base_model().transformer.wte.weight.detach().clone()
    train(engine_of(2, 3, folder, model), STOPPED)
    dist.barrier()
    if dist.get_rank() > 0:
        return None
    published = read_whole(publish_alone(folder / "live", lambda tag: folder / tag)).parameters
    (name,) = (name for name in published if name.endswith("wte.weight"))
    return len(published), torch.equal(published[name], embedding)


def test_a_frozen_embedding_of_two_pipeline_ranks_is_published_once(tmp_path):
    parameters = sum(1 for _ in adapted("GPT-2").parameters())
    assert run_on_ranks(2, publish_an_adapter, tmp_path)[0] == (parameters, True)


def test_no_state_takes_the_place_of_a_later_checkpoint_of_stock_deepspeed(tmp_path):
    for said, latest in run_on_ranks(2, come_back_from_stock, tmp_path):
        assert "stock DeepSpeed wrote it: convert it" in said and latest == "stock"


def test_a_run_goes_on_from_the_state_of_its_last_step(tmp_path):
    assert run_on_ranks(2, go_on, tmp_path, CASES) == [[(STOPPED, True)] * len(CASES)] * 2
