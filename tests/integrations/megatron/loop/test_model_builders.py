"""Megatron-LM's builders of models, of releases from 0.18 on: a stand-in has their interface."""

import sys
from argparse import Namespace
from types import ModuleType

import pytest

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.megatron.loop import megatron_seams as seams
from ds_lgamp.integrations.megatron.loop import sharded_model as sharded
from ds_lgamp.integrations.megatron.loop.install import builder_replacements

DEFAULT, OTHER = "the default type", "another type"


def build_virtual_pipeline_stages(build_model_func, pg_collection, vp_size, model_type=DEFAULT):
    return Namespace(stock=(build_model_func, pg_collection, vp_size, model_type))


def unimodal_build_distributed_models(build_model_func, transformer_config, pg_collection, wrap_with_ddp=True):
    return [Namespace(config=transformer_config, wrapped=wrap_with_ddp)]


@pytest.fixture
def builders(monkeypatch):
    module = ModuleType(seams.BUILDERS)
    module.build_virtual_pipeline_stages = build_virtual_pipeline_stages
    module.unimodal_build_distributed_models = unimodal_build_distributed_models
    monkeypatch.setitem(sys.modules, seams.BUILDERS, module)
    return module


@pytest.fixture
def begun():
    """Collects a word each time that a rank begins to build."""
    return []


@pytest.fixture
def stages(builders, begun):
    """Returns what takes the place of the stand-in's ``build_virtual_pipeline_stages``."""
    return builder_replacements(lambda: begun.append("begun"), 1)[build_virtual_pipeline_stages]


def groups(pipeline_ranks):
    return Namespace(pp=Namespace(size=lambda: pipeline_ranks))


def build_model(pg_collection, pre_process=None, post_process=None, vp_stage=None):
    model = Namespace(groups=pg_collection, ends=(pre_process, post_process), config=Namespace(num_layers=2))
    model.decoder = Namespace(layers=[vp_stage])
    return model


ON_ONE = groups(1)


@pytest.mark.parametrize(
    ("positional", "options", "model_type"),
    [
        ((build_model, ON_ONE, 2), {}, DEFAULT),
        ((build_model, ON_ONE, 2, OTHER), {}, OTHER),
        ((build_model, ON_ONE, 2), {"model_type": OTHER}, OTHER),
        ((), {"build_model_func": build_model, "pg_collection": ON_ONE, "vp_size": 2}, DEFAULT),
    ],
)
def test_one_pipeline_rank_gets_its_chunks_however_the_call_is_written(stages, begun, positional, options, model_type):
    chunks = stages(*positional, **options)
    assert [chunk.ends for chunk in chunks] == [(True, False), (False, True)]
    assert [(chunk.vp_stage, chunk.model_type) for chunk in chunks] == [(0, model_type), (1, model_type)]
    assert all(chunk.groups is ON_ONE for chunk in chunks)
    assert begun == ["begun"]


@pytest.mark.parametrize(("ranks", "chunks"), [(1, None), (2, None), (2, 2)])
def test_megatron_lm_builds_everything_else_itself(stages, begun, ranks, chunks):
    several = groups(ranks)
    assert stages(build_model, several, chunks).stock == (build_model, several, chunks, DEFAULT)
    assert stages(build_model, pg_collection=several, vp_size=chunks, model_type=OTHER).stock[-1] == OTHER
    assert begun == ["begun"] * 2


def test_stages_2_and_3_take_the_place_of_data_parallelism_in_builders(builders, monkeypatch):
    args = Namespace(
        accumulate_allreduce_grads_in_fp32=True, check_for_nan_in_loss_and_grad=False, data_parallel_random_init=False
    )
    training = ModuleType("megatron.training")
    training.get_args = lambda: args
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    monkeypatch.setattr(sharded, "ShardedChunk", lambda config, ddp_config, model: (ddp_config, model))
    replaced = builder_replacements(lambda: None, 3)
    assert replaced.keys() == {build_virtual_pipeline_stages, unimodal_build_distributed_models}
    build = replaced[unimodal_build_distributed_models]
    ((ddp_config, model),) = build(build_model, Namespace(), ON_ONE)
    assert ddp_config.grad_reduce_in_fp32 and not model.wrapped
    assert [model.wrapped for model in build(build_model, Namespace(), ON_ONE, wrap_with_ddp=False)] == [False]
    assert unimodal_build_distributed_models not in builder_replacements(lambda: None, 1)


def test_a_release_without_builders_has_nothing_to_replace(monkeypatch):
    # Packages of releases from 0.18 on have them.
    monkeypatch.setitem(sys.modules, seams.BUILDERS, None)
    assert builder_replacements(lambda: None, 3) == {}


def test_builders_with_another_interface_are_a_seam_that_moved(builders, monkeypatch):
    # The training loop itself cannot be imported without a tree.
    monkeypatch.setitem(sys.modules, "megatron.training.training", ModuleType("megatron.training.training"))
    monkeypatch.setattr(seams, "TRAINING_PARAMETERS", {})
    seams.check_training_seams()
    builders.build_virtual_pipeline_stages = lambda build_model_func, groups: None
    del builders.unimodal_build_distributed_models
    lacks = f"the parameters of build_virtual_pipeline_stages, {seams.BUILDERS}.unimodal_build_distributed_models"
    with pytest.raises(ConfigError, match=f"the Megatron-LM of megatron-core .* lacks {lacks}; ds_lgamp is tested"):
        seams.check_training_seams()
