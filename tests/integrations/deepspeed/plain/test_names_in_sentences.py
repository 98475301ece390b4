"""Sentences call parameters and buffers as the model of the script does, not by the layers of the engine."""

from collections.abc import Callable

import deepspeed
import pytest
import torch

import ds_lgamp
from ds_lgamp.integrations.user_script import finish_engines
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain.first_values import OddModel
from tests.integrations.deepspeed.plain.training import configuration, initialize


def model_of(kind: str = "scalar") -> OddModel:
    torch.manual_seed(0)
    return OddModel([([kind], ["one"])] * 4)


def sentence_of(call: Callable[[], object]) -> str:
    with pytest.raises(Exception) as error:
        call()
    return str(error.value)


def sentences(folder: str) -> list[str]:
    prepare_rank()
    ds_lgamp.install()
    config = configuration(1, {"layers_per_chunk": 1})
    told = []

    model = model_of()
    twice = [{"params": [*model.parameters()]}, {"params": [model.blocks[1].linear.weight]}]
    told.append(sentence_of(lambda: _initialize(model, twice, config)))

    model = model_of()
    model.blocks[1].linear.weight.data = model.blocks[2].linear.weight.data
    told.append(sentence_of(lambda: initialize(model, config)))

    engine = initialize(model_of(), config)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    finish_engines()
    other = initialize(model_of("transposed"), config)
    told.append(sentence_of(lambda: other.load_checkpoint(folder)))
    return told


def _initialize(model: torch.nn.Module, groups: list, config: dict) -> None:
    with quiet():
        optimizer = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        deepspeed.initialize(model=model, model_parameters=groups, config={**config, **optimizer})


def test_sentences_have_the_names_of_the_model(tmp_path):
    for grouped, tied, loaded in run_on_ranks(1, sentences, str(tmp_path)):
        assert "parameter blocks.1.linear.weight is in parameter groups 0 and 1" in grouped
        assert tied.startswith("blocks.1.linear.weight and blocks.2.linear.weight share memory")
        assert "(blocks.0.trained.0 is [] there, [12, 12] here" in loaded
        for sentence in (grouped, tied, loaded):
            assert ".blocks." not in sentence
