"""Transformer Engine's delayed scaling is refused. A stand-in has the names of Transformer Engine: it needs a GPU."""

import sys
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.model.recomputation import refuse_delayed_scaling
from ds_lgamp.runtime.executor import ActionError
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.linear import batches, engine_of, mean_square

WORDS = "fp8_recipe is DelayedScaling, .*; give Transformer Engine's autocast Float8CurrentScaling, MXFP8BlockScaling"


class Manager:
    """What an autocast switches on."""

    recipe: object = None

    @classmethod
    def is_fp8_enabled(cls):
        return cls.recipe is not None

    @classmethod
    def get_fp8_recipe(cls):
        return cls.recipe


class DelayedScaling:
    """The recipe with a history."""


class Float8CurrentScaling:
    """A recipe without one."""


class TELinear(nn.Linear):
    """Stands in for a part of Transformer Engine."""


TELinear.__module__ = "transformer_engine.pytorch.module.linear"


class MegatronsLinear(TELinear):
    """Derives from such a part, as Megatron-core's do."""


class Layer(nn.Module):
    """A user's layer, which enters an autocast of its own."""

    def __init__(self, recipe, part=MegatronsLinear):
        super().__init__()
        self.recipe, self.linear = recipe, part(6, 6)

    def forward(self, inputs):
        with autocast(self.recipe):
            return self.linear(inputs)


@contextmanager
def autocast(recipe):
    Manager.recipe = recipe
    try:
        yield
    finally:
        Manager.recipe = None


def stand_in(modules):
    """Enters Transformer Engine into ``modules``, which are those of Python."""
    recipes, manager = ModuleType("transformer_engine.common.recipe"), ModuleType("transformer_engine.pytorch.fp8")
    recipes.DelayedScaling, manager.FP8GlobalStateManager = DelayedScaling, Manager
    for name in ("transformer_engine", "transformer_engine.common", "transformer_engine.pytorch"):
        modules[name] = ModuleType(name)
    modules |= {module.__name__: module for module in (recipes, manager)}


@pytest.fixture
def engine(monkeypatch):
    known = dict(sys.modules)
    stand_in(known)
    monkeypatch.setattr(sys, "modules", known)


@pytest.mark.parametrize("part", [TELinear, MegatronsLinear])
def test_a_part_that_is_called_with_delayed_scaling_is_refused(engine, part):
    layer = Layer(DelayedScaling(), part)
    layer(torch.ones(1, 6))
    refuse_delayed_scaling(layer)
    with pytest.raises(ConfigError, match=WORDS):
        layer(torch.ones(1, 6))


@pytest.mark.parametrize("layer", [Layer(None), Layer(Float8CurrentScaling()), Layer(DelayedScaling(), nn.Linear)])
def test_no_autocast_another_recipe_and_other_parts_pass(engine, layer):
    refuse_delayed_scaling(layer)
    assert layer(torch.ones(1, 6)).shape == (1, 6)


def train():
    prepare_rank()
    stand_in(sys.modules)
    engine_of(pipeline(Float8CurrentScaling()), {}).train_batch(batches(2))
    with pytest.raises(ActionError, match=f"ConfigError: {WORDS}"):
        engine_of(pipeline(DelayedScaling()), {}).train_batch(batches(2))


def pipeline(recipe):
    with quiet():
        return PipelineModule([LayerSpec(Layer, recipe) for _ in range(2)], num_stages=1, loss_fn=mean_square)


def test_an_engine_refuses_it_in_the_first_forward():
    run_on_ranks(1, train)
