"""Arguments of the small forward: what the block describes, and what a model makes of a text by its tokenizer."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.split.trials import given_inputs, inputs_of
from tests.integrations.split.own_models import LENGTH, VOCABULARY, WIDTH, Attention, Gpt, micro_batch
from tests.integrations.split.splitting import assert_gradients, in_layers, in_layers_apart, layers_of

NUMBERS = st.integers(0, 9) | st.floats(0, 1) | st.booleans()
ROWS = st.lists(st.lists(NUMBERS, min_size=2, max_size=2), min_size=1, max_size=3)
SHAPES = st.fixed_dictionaries(
    {"shape": st.lists(st.integers(0, 3), max_size=3)}, optional={"dtype": st.sampled_from(["int64", "bfloat16"])}
)
OTHERS = NUMBERS | st.text(max_size=3) | st.none() | st.lists(st.text(max_size=3), min_size=1, max_size=2)
NAMES = st.sampled_from(["input_ids", "mask", "sizes"])
VALUES = st.recursive(
    ROWS | SHAPES | OTHERS,
    lambda inner: (
        st.dictionaries(NAMES, inner, max_size=2) | st.lists(st.dictionaries(NAMES, inner), min_size=1, max_size=2)
    ),
    max_leaves=5,
)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(NAMES, VALUES))
def test_what_is_described_nests_as_it_is_described(described: dict[str, Any]) -> None:
    def check(value: Any, made: Any) -> None:
        if isinstance(value, dict) and "shape" in value:
            assert list(made.shape) == value["shape"]
            assert made.dtype == getattr(torch, value.get("dtype", "float32")) and not made.any()
        elif isinstance(value, dict):
            assert list(made) == list(value)
            for name, each in value.items():
                check(each, made[name])
        elif isinstance(value, list) and isinstance(value[0], dict):
            for each, other in zip(value, made, strict=True):
                check(each, other)
        elif isinstance(value, list) and isinstance(value[0], list):
            assert torch.equal(made, torch.tensor(value))
        else:
            assert made == value

    check(described, given_inputs(described))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"dtype": "int64"}, "features"),
        ({"ids": {"shape": [1], "dtype": "none"}}, "features.ids"),
        ([{"ids": [[1], [1, 2]]}], "features.0.ids"),
    ],
)
def test_what_describes_no_tensor_is_named_by_its_place(value: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"ds_lgamp.dummy_inputs.{name} is .*, which makes no tensor"):
        given_inputs({"features": value})


class Embedder(nn.Module):
    """Writes what it computes to the dictionary that it gets, as modules of sentence-transformers do, which embed
    texts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Attention(causal=False) for _ in range(2))
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        assert "token_embeddings" not in features, "a run sees what another one wrote"
        features["length"] = features.pop("input_ids").shape[1]
        features["token_embeddings"] = self.embedding(features["ids"].pop())
        for block in self.blocks:
            features["token_embeddings"] = block(features["token_embeddings"])
        features["embedding"] = self.dense(features["token_embeddings"]).mean(1) * features["length"]
        return features


def features_of(tokens: Tensor) -> dict[str, Any]:
    return {"input_ids": tokens, "ids": [tokens]}


DUMMY = {"features": {"input_ids": {"shape": [1, 3], "dtype": "int64"}, "ids": [{"shape": [1, 3], "dtype": "int64"}]}}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forward_may_write_to_the_containers_that_it_gets(ranks: int) -> None:
    torch.manual_seed(0)
    model = Embedder()
    layers = layers_of(model, outputs="all", dummy_inputs=DUMMY, pipeline_ranks=ranks)
    given = features_of(torch.randint(VOCABULARY, (2, LENGTH)))
    expected = model(features_of(given["input_ids"]))["embedding"]
    found = in_layers_apart(layers, given)["embedding"]
    assert torch.equal(found, expected) and list(given) == ["input_ids", "ids"]
    assert_gradients(model, found.square().sum(), expected.square().sum())


class OfTexts(Embedder):
    tokenizer = object()

    def tokenize(self, texts: list[str]) -> dict[str, Any]:
        assert all(isinstance(each, str) for each in texts)
        return features_of(torch.zeros(len(texts), 3, dtype=torch.int64))


def test_a_model_with_a_tokenizer_gets_what_it_makes_of_a_text() -> None:
    (features,), named = inputs_of(OfTexts())
    assert features["input_ids"].shape == (1, 3) and not named
    assert len(layers_of(OfTexts(), outputs="all").modules) == 4


class OfPictures(Embedder):
    tokenizer = object()

    def preprocess(self, pictures: Any) -> Any:
        return pictures.float()

    def tokenize(self, texts: Any) -> Any:
        return [[1]]


class WithoutTokenizer(OfTexts):
    tokenizer = None


@pytest.mark.parametrize("model", [OfPictures, WithoutTokenizer])
def test_methods_that_make_no_features_of_texts_do_not_count(model: Any) -> None:
    assert set(inputs_of(model())[1]) == {"features"}


def test_a_forward_may_take_any_number_of_arguments_by_position():
    class Taking(Gpt):
        def forward(self, tokens, *rest):
            return super().forward(tokens, rest[0])

    model, (tokens, labels) = Taking(), micro_batch("", 0)
    assert torch.equal(in_layers(layers_of(model), tokens, labels), model(tokens, labels))
