"""What the forward of a model of transformers does beside computing its output, on several ranks."""

import pytest
import torch

from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain import forwards
from tests.integrations.transformers.models import make, micro_batch
from tests.integrations.transformers.test_hooks import shift_tokens, triple_loss


def test_hooks_of_the_model_run_once_however_it_is_evaluated():
    model = make("Llama").eval()
    batches, wanted = [micro_batch(7, rank, 0) for rank in range(2)], []
    for _ in range(2):
        with torch.no_grad():
            wanted.append([model(**batch).loss.item() for batch in batches])
        model.register_forward_pre_hook(shift_tokens, with_kwargs=True)
        model.register_forward_hook(triple_loss)
    for rank, (of_engine, of_model) in enumerate(run_on_ranks(2, forwards.evaluate_with_hooks)):
        own = [losses[rank] for losses in wanted]
        assert of_engine == pytest.approx(own, rel=1e-6)
        assert of_model == pytest.approx(own, rel=1e-6)


@pytest.mark.parametrize("pipeline_ranks", [1, 2])
def test_every_rank_learns_once_what_the_head_has_set_in_the_configuration(pipeline_ranks):
    found = "single_label_classification"
    assert run_on_ranks(2, forwards.learn_problem_types, pipeline_ranks) == [([None, found, found], 1)] * 2


def test_mistakes_with_models_are_named_on_every_rank():
    for errors in run_on_ranks(2, forwards.misuse_models):
        for what, words in {
            "compiled": "pass the model itself, and call engine.compile(), or set torch_compile=True",
            "logits": "the output of a training step has only 'loss', not 'logits'",
            "get": "similar losses and metrics of training batches need; set it to 'all', or leave the metric out",
        }.items():
            assert words in errors[what]


def test_a_loss_that_depends_on_a_block_is_refused_where_chunks_are_recomputed():
    [error] = run_on_ranks(1, forwards.train_on_more_than_the_last_layer)
    assert "the model's output depends on parameter 'model.layers.3.mlp.up_proj.weight'" in error
