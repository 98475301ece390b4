"""With ``"outputs": "all"`` the engine does for a script what trl's trainers ask of it."""

import deepspeed
import pytest
import torch
import torch.distributed as dist
from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

import ds_lgamp
from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.user_script import finish_engines
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, configuration, initialize
from tests.integrations.transformers.models import make, micro_batch_of

LAYOUTS = [(2, 1), (2, 3), (1, 3)]
"""Pipeline ranks of two ranks, and stages."""


class AskingHead(torch.autograd.Function):
    """Asks in its backward pass for the status of a weight that may be sharded, as trl's fused head does."""

    @staticmethod
    def forward(context, hidden, weight):
        context.save_for_backward(hidden, weight)
        return hidden @ weight.T

    @staticmethod
    def backward(context, gradient):
        hidden, weight = context.saved_tensors
        if is_deepspeed_zero3_enabled():
            assert weight.ds_status is not None
        return gradient @ weight, gradient.flatten(0, 1).T @ hidden.flatten(0, 1)


def with_asking_head():
    model = make("Llama")
    head = model.lm_head
    head.forward = lambda hidden: AskingHead.apply(hidden, head.weight)
    return model


def lose(model, reference, number):
    """Returns how far the outputs of the model are from those of the reference."""
    batch = micro_batch_of("Llama", 0, dist.get_rank(), number)
    batch.pop("labels")
    with torch.no_grad():
        wanted = reference(**batch).logits
    return (model(**batch).logits - wanted).square().mean()


def losses_on_rank(pipeline_ranks, stage):
    """Returns the losses of two steps, compared with a model that an engine without optimizer holds, and with a plain
    model."""
    prepare_rank()
    ds_lgamp.install()
    config = configuration(stage, {"pipeline_ranks": pipeline_ranks, "outputs": "all"})
    models = [(with_asking_head(), make("GPT-2").eval(), held) for held in (True, False)]
    # From here on, transformers knows the stage.
    keeps_alive = HfDeepSpeedConfig(config)
    losses = []
    for model, reference, held in models:
        engine = initialize(model, config)
        if held:
            with quiet():
                # Like trl, which shards such a model at stage 3 only.
                own = {**config, "zero_optimization": {"stage": 3 if stage == 3 else 0}}
                reference = deepspeed.initialize(model=reference, config=own)[0]
            reference.eval()
        engine.train()
        for number in range(2 * MICRO_BATCHES):
            loss = lose(engine, reference, number)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        finish_engines()
    del keeps_alive
    return losses


@pytest.mark.parametrize(("pipeline_ranks", "stage"), LAYOUTS)
def test_a_model_to_compare_with_and_heads_that_ask_for_shards_work_as_without_a_block(pipeline_ranks, stage):
    for losses in run_on_ranks(2, losses_on_rank, pipeline_ranks, stage):
        half = len(losses) // 2
        assert losses[:half] == pytest.approx(losses[half:], rel=1e-6)
        assert losses[half - 1] != losses[half - MICRO_BATCHES - 1]


def refusal_of_a_model_that_stock_deepspeed_shards():
    prepare_rank()
    ds_lgamp.install()
    config, model = configuration(3, {"outputs": "all"}), make("Llama")
    with quiet():
        deepspeed.initialize(model=model, config=config)
    with pytest.raises(ConfigError) as refused:
        initialize(model, config)
    return str(refused.value)


def test_a_model_that_an_engine_without_optimizer_has_sharded_already_is_refused_in_one_sentence():
    (message,) = run_on_ranks(1, refusal_of_a_model_that_stock_deepspeed_shards)
    assert message.startswith("the LlamaForCausalLM has an engine already")
