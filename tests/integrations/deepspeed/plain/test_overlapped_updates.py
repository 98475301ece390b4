"""With ``overlap_update``, a model of transformers trains to the bit as without, and its state is that of the step."""

import pytest
import torch
import torch.distributed as dist

import ds_lgamp
from ds_lgamp.integrations.user_script import finish_engines
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, configuration, initialize
from tests.integrations.transformers.models import make, micro_batch
from tests.slow import slow_except

STEPS = 3
CASES = [(1, 0), (2, 0), (1, 2), (2, 3)]
"""Pipeline ranks and ZeRO stage, on two ranks."""


def train(pipeline_ranks, stage, overlap_update):
    """Returns losses, outputs of an evaluation after each step, and the state of the model after the last."""
    torch.manual_seed(1)
    model = make("GPT-2")
    block = {"pipeline_ranks": pipeline_ranks, "overlap_update": overlap_update}
    engine = initialize(model, configuration(stage, block))
    told = []
    torch.manual_seed(2)
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            loss = engine(**micro_batch(step, dist.get_rank(), number)).loss
            engine.backward(loss)
            engine.step()
            told.append(loss.item())
        overdue = [unit for unit in engine.optimizer.partition.units if unit.storage.pending is not None]
        assert bool(overdue) == overlap_update
        if step == 1:
            with torch.no_grad():
                told.append(engine(**micro_batch(7, dist.get_rank(), 0)).loss.item())
    state = {name: value.clone() for name, value in model.state_dict().items()} if stage in (0, 3) else {}
    finish_engines()
    return told, state


def train_both(cases):
    """Returns, for each case, whether what it tells and its state are the same with and without overlap."""
    prepare_rank()
    ds_lgamp.install()
    found = []
    for case in cases:
        (plain, state), (overlapped, own_state) = (train(*case, overlap) for overlap in (False, True))
        same = state.keys() == own_state.keys() and all(torch.equal(own_state[name], state[name]) for name in state)
        found.append((plain == overlapped, same))
    return found


@pytest.mark.parametrize("cases", slow_except([CASES[:2]], [CASES[:2], CASES[2:]]), ids=["stage 0", "other stages"])
def test_a_model_of_transformers_trains_as_with_one_update_per_step(cases):
    assert run_on_ranks(2, train_both, cases) == [[(True, True)] * len(cases)] * 2
