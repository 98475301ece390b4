"""A script of Megatron-LM may collect what is no loss in its evaluations, at every stage."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.megatron.loop.install import evaluate_with_whole_weights
from testing.ranks import run_on_ranks
from tests.integrations.megatron.core_models import SEQUENCE
from tests.integrations.megatron.training_loop import SEQUENCES, STOCK, Place, Training, prepare_process

ALONE, SHARDED = Place(1, 1, STOCK), Place(1, 2, "layered", zero_stage=3)


@evaluate_with_whole_weights
@torch.no_grad()
def evaluate(training, model, process_non_loss_data_func=None, non_loss_data_func=None):
    """As Megatron-LM: a batch for the loss, and what is collected."""
    loss = training.run_batch(0, forward_only=True)
    if non_loss_data_func is not None:
        return loss, non_loss_data_func(model)
    if process_non_loss_data_func is not None and dist.get_rank() == dist.get_world_size() - 1:
        collected = training.forward_backward(**training.call(0), forward_only=True, collect_non_loss_data=True)
        return loss, process_non_loss_data_func(collected)
    return loss, None


def test_the_last_rank_may_run_a_batch_alone():
    whole, (first, last) = (run_on_ranks(ranks, run_batch_alone, before_init=prepare_process) for ranks in (1, 2))
    assert first == (pytest.approx(whole[0][0]), None)
    assert last == (first[0], [(SEQUENCES, SEQUENCE)] * 2)


def run_batch_alone():
    place = SHARDED._replace(data_ranks=2) if dist.get_world_size() == 2 else ALONE
    training = Training(place)
    found = evaluate(training, training.models, process_non_loss_data_func=lambda shapes: list(map(tuple, shapes)))
    training.run_batch(0)
    return found


def test_a_function_of_the_script_may_read_weights():
    run_on_ranks(2, read_weights, before_init=prepare_process)


def read_weights():
    expected, found = (
        evaluate(training, training.models, non_loss_data_func=sum_of_weights)
        for training in (Training(place._replace(data_ranks=2)) for place in (ALONE, SHARDED))
    )
    assert found == pytest.approx(expected)


def sum_of_weights(models):
    weights = {id(weight): weight for model in unwrap_model(models) for weight in model.parameters()}
    return sum(float(weight.double().abs().sum()) for weight in weights.values())


def test_a_batch_on_the_last_rank_alone_is_refused_where_ranks_share_the_model():
    run_on_ranks(2, refuse_partners, before_init=prepare_process)


def refuse_partners():
    training = Training(Place(2, 2, "layered"))
    with pytest.raises(ConfigError, match="^process_non_loss_data_func is given, .*, but 2 ranks share the model and "):
        evaluate(training, training.models, process_non_loss_data_func=len)
    loss, collected = evaluate(training, training.models, non_loss_data_func=len)
    assert (loss, collected) == (training.run_batch(0), 2)
