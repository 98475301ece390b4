"""With offloading, a model of transformers trains to the bit as on the device, and its state is that of the step."""

import pytest
import torch
import torch.distributed as dist

import ds_lgamp
from ds_lgamp.integrations.user_script import finish_engines
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.test_offload import OFFLOADS
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, configuration, initialize
from tests.integrations.transformers.models import make, micro_batch
from tests.slow import slow_except

STEPS = 3
INPUTS = {"outputs": "all", "offload_activations": "cpu"}
SOME = [(1, 3, "parameters", {}), (1, 3, "parameters on nvme", {}), (2, 2, "optimizer", INPUTS)]
MORE = [(2, 2, "optimizer", {}), (1, 3, "parameters", INPUTS), (2, 3, "parameters", {"outputs": "all"})]
"""Pipeline ranks, ZeRO stage, what the host keeps, and further keys of the block, on two ranks."""


def train(pipeline_ranks, stage, zero, block):
    """Returns losses, numbers of evaluations in and after the second step, and the model's state after the last."""
    torch.manual_seed(1)
    model = make("GPT-2")
    config = configuration(stage, {"pipeline_ranks": pipeline_ranks, **block})
    config["zero_optimization"] |= zero
    engine = initialize(model, config)
    told = []
    torch.manual_seed(2)
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            loss = engine(**micro_batch(step, dist.get_rank(), number)).loss
            if step == 1 and "outputs" in block:
                with torch.no_grad():
                    told.append(engine(**micro_batch(7, dist.get_rank(), 0)).logits.sum().item())
            engine.backward(loss)
            engine.step()
            told.append(loss.item())
        if step == 1:
            with torch.no_grad():
                told.append(engine(**micro_batch(7, dist.get_rank(), 0)).loss.item())
    state = {name: value.clone() for name, value in model.state_dict().items()} if stage == 3 else {}
    finish_engines()
    return told, state


def train_both(cases):
    """Returns, for each case, whether what it tells and its state are the same with and without offloading."""
    prepare_rank()
    ds_lgamp.install()
    found = []
    for pipeline_ranks, stage, kept, block in cases:
        on_device = {key: value for key, value in block.items() if key != "offload_activations"}
        plain, state = train(pipeline_ranks, stage, {}, on_device)
        offloaded, own_state = train(pipeline_ranks, stage, OFFLOADS[kept], block)
        same = state.keys() == own_state.keys() and all(torch.equal(own_state[name], state[name]) for name in state)
        found.append((plain == offloaded, same))
    return found


@pytest.mark.parametrize("cases", slow_except([SOME], [SOME, MORE]), ids=["some", "more"])
def test_a_model_of_transformers_trains_as_on_the_device(cases):
    assert run_on_ranks(2, train_both, cases) == [[(True, True)] * len(cases)] * 2
