"""Models whose head and loss are computed in pieces of rows: losses and gradients are those of whole logits."""

from typing import Any

import peft
import pytest
import torch

from testing.pieces import watch_pieces
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain.training import Course, train_all_on_rank, train_alone
from tests.integrations.transformers.by_hand import evaluated, in_layers, layers_of, whole
from tests.integrations.transformers.models import make, micro_batch_of
from tests.slow import slow_except

PIECE = 3


@pytest.fixture
def pieces(monkeypatch) -> list[int]:
    """The rows of every piece whose loss is computed."""
    return watch_pieces(monkeypatch.setattr)


def assert_equal(model: Any, batch: dict[str, Any], pieces: list[int], **settings: Any) -> None:
    expected = whole(model, batch)
    pieces.clear()
    found = in_layers(model, batch, loss_chunk=PIECE, **settings)
    assert pieces and max(pieces) == PIECE
    torch.testing.assert_close(found.output.loss, expected.output.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    slow_except(
        ["Llama", "GPT-2", "Gemma 2", "CohereConfig", "BERT in pretraining", "Mixtral with balance", "T5"],
        [
            "Llama",
            "GPT-2",
            "Gemma 2",
            "Gemma 3",
            "CohereConfig",
            "GraniteConfig",
            "BERT",
            "BERT in pretraining",
            "GPT-NeoX",
            "Mixtral with balance",
            "Qwen2.5-VL",
            "T5",
        ],
    ),
)
def test_a_loss_in_pieces_is_the_models(name, pieces):
    assert_equal(make(name), micro_batch_of(name, 0, 0, 0), pieces)


def adapted(**settings: Any) -> Any:
    config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=2, task_type="CAUSAL_LM", **settings)
    torch.manual_seed(5)
    model = peft.get_peft_model(make("Llama"), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def test_adapters_of_the_head_get_their_gradients(pieces):
    assert_equal(adapted(), micro_batch_of("Llama", 0, 0, 0), pieces)


def test_a_copy_of_the_head_that_trains_gets_its_gradients(pieces):
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    assert_equal(peft.get_peft_model(make("Llama"), config), micro_batch_of("Llama", 0, 0, 0), pieces)


def test_a_head_with_dropout_is_left_alone(pieces):
    in_layers(adapted(lora_dropout=0.5).train(), micro_batch_of("Llama", 0, 0, 0), loss_chunk=PIECE)
    assert not pieces


def test_hooks_of_the_head_run(pieces):
    model = make("Llama")
    model.lm_head.register_forward_pre_hook(lambda module, positional: (3 * positional[0],))
    model.lm_head.register_forward_hook(lambda module, positional, result: 2 * result)
    assert_equal(model, micro_batch_of("Llama", 0, 0, 0), pieces)


def in_an_own_way(model: Any) -> Any:
    stock = model.lm_head.forward
    model.lm_head.forward = lambda hidden: 2 * stock(hidden)
    return model


def parametrised(model: Any) -> Any:
    torch.nn.utils.parametrizations.weight_norm(model.lm_head)
    return model


def hooked_backwards(model: Any) -> Any:
    model.lm_head.register_full_backward_hook(lambda module, inputs, outputs: (2 * inputs[0],))
    return model


@pytest.mark.parametrize("change", [in_an_own_way, parametrised, hooked_backwards])
def test_an_unknown_head_is_left_alone(change, pieces):
    model, batch = change(make("Llama")), micro_batch_of("Llama", 0, 0, 0)
    expected, found = whole(model, batch), in_layers(model, batch, loss_chunk=PIECE)
    assert not pieces
    torch.testing.assert_close(found.output.loss, expected.output.loss)
    torch.testing.assert_close(found.gradients, expected.gradients)


def test_an_unknown_loss_gets_whole_logits(pieces):
    model, batch = make("Llama"), micro_batch_of("Llama", 0, 0, 0)

    def loss(logits, labels, vocab_size, **_):
        return torch.log_softmax(logits.float(), -1).gather(-1, labels.clamp(min=0)[..., None]).mean().neg()

    model.loss_function = loss
    expected, found = whole(model, batch), in_layers(model, batch, loss_chunk=PIECE)
    assert not pieces
    torch.testing.assert_close(found.output.loss, expected.output.loss)
    torch.testing.assert_close(found.gradients, expected.gradients)


@pytest.mark.parametrize("loss_chunk", slow_except([0, "auto"], [0, None, "auto"]))
def test_few_rows_are_computed_whole(loss_chunk, pieces):
    in_layers(make("Llama"), micro_batch_of("Llama", 0, 0, 0), loss_chunk=loss_chunk)
    assert not pieces


def test_evaluation_and_scripts_that_read_outputs_get_whole_logits(pieces):
    model, batch = make("Llama"), micro_batch_of("Llama", 0, 0, 0)
    expected = whole(model, batch).output.logits
    assert torch.equal(evaluated(layers_of(model, loss_chunk=PIECE), batch).logits, expected)
    pieces.clear()
    assert torch.equal(in_layers(model, batch, loss_chunk=PIECE, outputs="all").output.logits, expected)
    assert not pieces


def train_in_pieces(cases: list[tuple[str, int, dict[str, Any]]]) -> list[tuple[Course, list[int]]]:
    found = []
    for case in cases:
        with pytest.MonkeyPatch.context() as patch:
            seen = watch_pieces(patch.setattr)
            found += [(course, seen) for course in train_all_on_rank([case])]
    return found


ENGINES: dict[tuple[int, int], dict[str, tuple[str, int, dict[str, Any]]]] = {
    (1, 1): {
        "a tied head": ("GPT-2", 2, {}),
        "nonfinite numbers are looked for": ("Llama", 0, {"nonfinite": "skip"}),
    },
    (2, 1): {
        "a soft cap": ("Gemma 2", 3, {}),
        "a tied head": ("GPT-2", 3, {"chunks_per_rank": 1}),
        "a last chunk that is recomputed": ("Llama", 3, {"schedule": "gpipe"}),
        "no recomputation": ("Llama", 1, {"recompute": "none"}),
        "adapters": ("Llama with LoRA", 3, {}),
    },
    (1, 2): {"a logit scale": ("CohereConfig", 3, {"micro_batch_group": 1})},
}
"""By the numbers of pipeline and data-parallel ranks: model, ZeRO stage and block."""


@pytest.mark.parametrize(("pipeline", "data"), ENGINES)
def test_engines_train_in_pieces_as_one_process(pipeline, data):
    cases = [
        (name, stage, {"pipeline_ranks": pipeline, "loss_chunk": PIECE, **block})
        for name, stage, block in ENGINES[pipeline, data].values()
    ]
    ranks = run_on_ranks(pipeline * data, train_in_pieces, cases)
    for (name, *_), *found in zip(cases, *ranks):
        assert any(pieces and max(pieces) == PIECE for _, pieces in found), name
        expected = train_alone(name, pipeline * data)
        for (course, _), wanted in zip(found, expected):
            assert course.losses == pytest.approx(wanted.losses, rel=1e-6), name
        for step, wanted in enumerate(expected[0].gradients):
            own = {key: each for course, _ in found for key, each in course.gradients[step].items()}
            assert own.keys() == wanted.keys(), name
            torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-6)
