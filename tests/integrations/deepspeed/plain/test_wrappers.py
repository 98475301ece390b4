"""Where the block names the model inside, the code around it runs as the script wrote it, and its parameters train."""

from functools import cache

import pytest
import torch
from torch import nn

from ds_lgamp.config import ConfigError, LgampConfig
from ds_lgamp.integrations.deepspeed.plain.wrapper import split_of
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain import wrappers
from tests.integrations.transformers.models import make
from tests.slow import slow_except

TOGETHER = 2
"""How many seeds the same ranks train."""
SEEDS = [*range(TOGETHER), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(TOGETHER, 16))]
LAYOUTS = {(1, 1): 3, (1, 2): 2, (2, 1): 0, (2, 2): 3}
"""Stages by pipeline and data-parallel ranks."""
alone = cache(wrappers.train_alone)


@pytest.fixture(scope="module")
def trained():
    """Returns a function that returns what all ranks of a layout return, by seed."""

    @cache
    def of_layout(pipeline, data, first):
        block = {"pipeline_ranks": pipeline}
        cases = [(seed, LAYOUTS[pipeline, data], block) for seed in range(first, first + TOGETHER)]
        return [*zip(*run_on_ranks(pipeline * data, wrappers.train_on_rank, cases))]

    return lambda pipeline, data, seed: of_layout(pipeline, data, seed - seed % TOGETHER)[seed % TOGETHER]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("pipeline", "data"), slow_except([(1, 1), (1, 2), (2, 1)], [*LAYOUTS], several=True))
def test_losses_and_weights_are_those_of_one_process(pipeline, data, seed, trained):
    losses, state = alone(seed, pipeline * data)
    ranks = trained(pipeline, data, seed)
    per_step = len(losses) // wrappers.STEPS // len(ranks)
    for rank, (own, _) in enumerate(ranks):
        steps = range(wrappers.STEPS)
        starts = [(step * len(ranks) + rank) * per_step for step in steps]
        wanted = [value for start in starts for value in losses[start : start + per_step]]
        assert own == pytest.approx([*wanted, *losses[-2:]], rel=1e-5)
    whole = ranks[0][1]
    assert whole.keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(whole[name], value, rtol=1e-5, atol=1e-7)


class LightningModule(nn.Module):
    """Stands for Lightning's."""

    __module__ = "lightning.pytorch.core.module"

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


def frozen(name):
    return make(name).requires_grad_(False)


@pytest.mark.parametrize(
    ("modules", "path"),
    [
        (lambda: {"teacher": frozen("GPT-2"), "student": make("Llama"), "head": nn.Linear(4, 4)}, "student"),
        (lambda: {"head": nn.Linear(4, 4), "parts": nn.ModuleDict({"policy": make("Llama")})}, "parts.policy"),
        (lambda: {"head": nn.Linear(4, 4), "encoder": wrappers.Encoder()}, "encoder"),
    ],
)
def test_the_model_in_a_lightning_module_is_found(modules, path):
    split, settings = split_of(LightningModule(**modules()), LgampConfig())
    assert split.model is split.wrapper.get_submodule(path)
    assert settings.outputs == "all"


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (lambda: {"policy": make("Llama"), "value": make("GPT-2")}, "trains several models, policy, value; set ds_lg"),
        (lambda: {"blocks": wrappers.Encoder().blocks}, "holds the list 'blocks' itself, and Lightning replaces its"),
    ],
)
def test_a_lightning_module_without_one_model_is_refused(modules, words):
    with pytest.raises(ConfigError, match=words):
        split_of(LightningModule(**modules()), LgampConfig())


def test_other_modules_are_split_as_a_whole():
    model, settings = nn.ModuleDict({"encoder": wrappers.Encoder()}), LgampConfig()
    assert split_of(model, settings) == (model, settings)


@pytest.mark.parametrize("stage", [0, 3])
def test_files_have_all_values_whoever_saves_them(stage, tmp_path):
    first, _ = run_on_ranks(2, wrappers.saved, stage, str(tmp_path))
    whole = {"head.bin": [], "encoder.bin": [], "example.bin": []}
    assert first == {**dict.fromkeys(wrappers.WAYS, whole), "the model inside": {"encoder.bin": []}}


@pytest.mark.parametrize("pipeline", [1, 2])
def test_mistakes_are_refused(pipeline):
    for errors in run_on_ranks(pipeline, wrappers.mistakes, pipeline):
        for what, words in {
            "no such model": "ds_lgamp.model is 'encoder', but Wrapper has no module of this name; name the model in",
            "no blocks": "ds_lgamp.model is 'head.0', but this Linear has no list of blocks in it; name the module",
            "the list": "ds_lgamp.model is 'parts.encoder.blocks', but this ModuleList has no list of blocks in it",
            "early": "head.0.weight is used before the model inside is called; with a ds_lgamp block",
            "autocast": "the code around Encoder calls it under torch.autocast, but with a ds_lgamp block",
            "Lost": "has a gradient from before the first call of the model inside that trains, which would be lost",
            "Recomputed": "the model is called in a backward pass, as by torch.utils.checkpoint",
            "Clips": "the code around the model changes head.0.weight, but with a ds_lgamp block it has a copy",
            "ClipsData": "the code around the model changes head.0.weight, but with a ds_lgamp block it has a copy",
            "Averages": "the code around the model changes head.0.bias, but with a ds_lgamp block it has a copy",
            "unfrozen": "fixed was frozen when deepspeed.initialize got it, and trains now",
            "replaced": "the forward of the Encoder was replaced after deepspeed.initialize",
        }.items():
            assert words in errors[what]


def test_frozen_parameters_follow_the_script():
    for engine, alone in run_on_ranks(2, wrappers.follows_changes):
        assert engine == pytest.approx(alone)


def test_train_is_that_of_the_script():
    for training in run_on_ranks(2, wrappers.training_modules):
        assert training == ["", "parts", "head", "head.0", "head.1", "head.2"]


def test_modules_may_have_any_name():
    for engine, alone in run_on_ranks(2, wrappers.with_names, wrappers.Named, "model.encoder"):
        assert engine == pytest.approx(alone)
