"""What balances the experts of a model reaches the script, and costs what it must."""

import pytest
import torch
import torch.distributed as dist

import ds_lgamp
from ds_lgamp.integrations.split.outputs import MissingOutput
from ds_lgamp.integrations.user_script import finish_engines
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, configuration, initialize
from tests.integrations.transformers.models import BALANCED, make, micro_batch_of
from tests.slow import slow_except

LAYOUTS = [(2, 3), (2, 1), (1, 3)]
"""Pipeline ranks of two ranks, and stages."""


def numbers_on_rank(name: str, pipeline_ranks: int, stage: int) -> tuple[list[float], list[float], float]:
    """Evaluates, and trains a step. Returns the losses of balance and all losses of the engine, and how far the
    evaluation is from a plain model's."""
    prepare_rank()
    ds_lgamp.install()
    model, plain = make(name), make(name)
    engine = initialize(model, configuration(stage, {"pipeline_ranks": pipeline_ranks, "outputs": "all"}))
    engine.eval()
    batch = micro_batch_of(name, 1, dist.get_rank(), 0)
    with torch.no_grad():
        given, wanted = engine(**batch), plain.eval()(**batch)
    pairs = [*zip(given.router_logits, wanted.router_logits, strict=True), (given.aux_loss, wanted.aux_loss)]
    engine.train()
    balances, losses = [], []
    for number in range(MICRO_BATCHES):
        output = engine(**micro_batch_of(name, 0, dist.get_rank(), number))
        balances.append(output.aux_loss.item())
        losses.append(output.loss.item())
        with pytest.raises(MissingOutput, match="router_logits stay on the ranks of their blocks in training"):
            output.router_logits[0].sum()
        engine.backward(output.loss)
        engine.step()
    finish_engines()
    return balances, losses, max((one - other).abs().max().item() for one, other in pairs)


@pytest.mark.parametrize("name", slow_except(["Qwen3-MoE with balance"], BALANCED))
@pytest.mark.parametrize(("pipeline_ranks", "stage"), LAYOUTS)
def test_the_script_gets_the_loss_of_balance_and_in_evaluation_the_logits(name, pipeline_ranks, stage):
    model = make(name)
    for rank, (balances, losses, distance) in enumerate(run_on_ranks(2, numbers_on_rank, name, pipeline_ranks, stage)):
        outputs = [model(**micro_batch_of(name, 0, rank, number)) for number in range(MICRO_BATCHES)]
        assert balances == pytest.approx([output.aux_loss.item() for output in outputs], rel=1e-6)
        assert losses == pytest.approx([output.loss.item() for output in outputs], rel=1e-6)
        assert distance < 1e-6
