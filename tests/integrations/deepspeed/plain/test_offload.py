"""With offloading, a model of transformers trains to the bit as on the device, and its state is that of the step."""

import torch
import torch.distributed as dist

import ds_lgamp
from ds_lgamp.integrations.deepspeed.engine.ending import finish_engines
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.test_offload import OFFLOADS
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, configuration, initialize
from tests.integrations.transformers.models import make, micro_batch

STEPS = 3
CASES = [(1, 3, "parameters"), (2, 2, "optimizer"), (1, 3, "parameters on nvme")]
"""Pipeline ranks, ZeRO stage and what the host keeps, on two ranks."""


def train(pipeline_ranks, stage, zero):
    """Returns losses, the loss of an evaluation after the second step, and the state of the model after the last."""
    torch.manual_seed(1)
    model = make("GPT-2")
    config = configuration(stage, {"pipeline_ranks": pipeline_ranks})
    config["zero_optimization"] |= zero
    engine = initialize(model, config)
    told = []
    torch.manual_seed(2)
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            loss = engine(**micro_batch(step, dist.get_rank(), number)).loss
            engine.backward(loss)
            engine.step()
            told.append(loss.item())
        if step == 1:
            with torch.no_grad():
                told.append(engine(**micro_batch(7, dist.get_rank(), 0)).loss.item())
    state = {name: value.clone() for name, value in model.state_dict().items()} if stage == 3 else {}
    finish_engines()
    return told, state


def train_both():
    """Returns, for each case, whether what it tells and its state are the same with and without offloading."""
    prepare_rank()
    ds_lgamp.install()
    found = []
    for pipeline_ranks, stage, kept in CASES:
        (plain, state), (offloaded, own_state) = (train(pipeline_ranks, stage, zero) for zero in ({}, OFFLOADS[kept]))
        same = state.keys() == own_state.keys() and all(torch.equal(own_state[name], state[name]) for name in state)
        found.append((plain == offloaded, same))
    return found


def test_a_model_of_transformers_trains_as_on_the_device():
    assert run_on_ranks(2, train_both) == [[(True, True)] * len(CASES)] * 2
