"""Settings, iterators and models that batches of a block cannot take are refused."""

from argparse import Namespace
from inspect import signature

import pytest
import torch

from ds_lgamp.config import ConfigError, LgampConfig
from ds_lgamp.integrations.hosts import resolve
from ds_lgamp.integrations.megatron.loop.arguments import Job
from ds_lgamp.integrations.megatron.loop.batch import refuse_another_file, refuse_settings, refuse_unsupported
from ds_lgamp.integrations.megatron.loop.install import install_schedules, uninstall
from ds_lgamp.integrations.megatron.loop.several_chunks import share_embedding
from testing.ranks import run_on_ranks
from tests.integrations.megatron.training_loop import Place, Training, prepare_process


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("overlap_moe_expert_parallel_comm", True),
        ("fine_grained_activation_offloading", True),
        ("num_microbatches_with_partial_activation_checkpoints", 2),
        ("cpu_offloading", True),
        ("cuda_graph_impl", "local"),
    ],
)
def test_settings_of_megatrons_own_schedules_are_refused(setting, value):
    with pytest.raises(ConfigError, match=f"{setting} is {value!r}: it needs Megatron-core's own schedules; remove it"):
        refuse_unsupported(batch_of(model(), **{setting: value}))


def test_settings_of_data_parallelism_are_refused_without_megatron_lms_arguments():
    with pytest.raises(ConfigError, match="^fp8_param_gather is True: it needs Transformer Engine"):
        refuse_unsupported(batch_of(model(ddp_config=Namespace(fp8_param_gather=True))))
    together = model(ddp_config=Namespace(overlap_grad_reduce=True))
    with pytest.raises(ConfigError, match="^defer_embedding_wgrad_compute and overlap_grad_reduce are True: the out"):
        refuse_unsupported(batch_of(together, defer_embedding_wgrad_compute=True))
    refuse_unsupported(batch_of(together, defer_embedding_wgrad_compute=False))


@pytest.mark.parametrize(
    ("setting", "value"), [("mtp_num_layers", 1), ("perform_rl_step", True), ("has_cond_embedder", True)]
)
def test_what_needs_one_model_on_a_rank_is_refused_where_its_only_rank_has_chunks(setting, value):
    settings = Namespace(**{setting: value})
    refuse_settings(settings, chunks_on_one_rank=False)
    with pytest.raises(ConfigError, match=f"{setting} is {value!r}, whose .*; use more pipeline ranks, or set chunks"):
        refuse_settings(settings, chunks_on_one_rank=True)


@pytest.mark.parametrize(
    ("block", "stage", "said"),
    [
        (
            {},
            1,
            "zero_optimization.stage is 1, but .*use_distributed_optimizer is False; they mean the same, change one",
        ),
        ({"chunks_per_rank": 3}, 0, "chunks_per_rank is 3, but the script has built 1 chunks on this rank; change one"),
        (
            {"recompute": "full"},
            0,
            "recompute is 'full', but recompute_granularity of the TransformerConfig is None; mak",
        ),
        (
            {"recompute": "auto"},
            0,
            "recompute is 'auto', but recompute_granularity of the TransformerConfig is None; set it to 'full', which",
        ),
    ],
)
def test_a_file_that_says_something_else_than_a_loop_of_ones_own_does_is_refused(block, stage, said):
    batch = batch_of(model(ddp_config=Namespace(use_distributed_optimizer=False)), recompute_granularity=None)
    batch.forward_only = False
    with pytest.raises(ConfigError, match=said):
        refuse_another_file(batch, LgampConfig(**block), stage)
    refuse_another_file(batch, LgampConfig(chunks_per_rank=1, recompute="none"), 0)
    batch.forward_only = True
    refuse_another_file(batch, LgampConfig(**block), stage)


def test_chunks_that_share_an_iterator_are_refused():
    batch = batch_of(model(), model())
    batch.iterators = [iter(())]
    with pytest.raises(ConfigError, match="data_iterator is 1 for 2 chunks, which would read each other's"):
        refuse_unsupported(batch)


def test_one_rank_whose_chunks_have_two_embeddings_where_the_model_has_one_is_refused():
    models = [model(), model()]
    with pytest.raises(ConfigError, match="a weight each; before DistributedDataParallel, call share_embedding"):
        refuse_unsupported(batch_of(*models))
    share_embedding(models)
    refuse_unsupported(batch_of(*models))
    assert models[1].shared_embedding_or_output_weight() is models[0].embedding.word_embeddings.weight


def test_a_parameter_that_two_chunks_would_train_is_refused_unless_it_is_frozen():
    run_on_ranks(1, train_with_one_norm_in_two_chunks, before_init=prepare_process)


def train_with_one_norm_in_two_chunks():
    training = Training(Place(1, 2, "layered"))
    first, last = (model.module.decoder.layers[0] for model in training.models)
    norm = last.input_layernorm = first.input_layernorm
    with pytest.raises(ConfigError, match="^decoder.layers.0.input_layernorm.weight of chunk 1 on this rank is also a"):
        training.run_batch(0)
    with torch.no_grad():
        evaluated = training.run_batch(0, forward_only=True)
    norm.requires_grad_(False)
    assert training.run_batch(0) == evaluated


@pytest.mark.parametrize("cut", [{"virtual": 2}, {"layout": "Ett|tL"}])
def test_a_model_that_takes_no_vp_stage_is_refused_where_it_would_ignore_the_cut(cut):
    from megatron.core.models.mamba import MambaModel

    hybrid = resolve("megatron.core.models.hybrid.hybrid_model.HybridModel")
    if "vp_stage" in signature(hybrid or MambaModel).parameters:
        pytest.skip("MambaModel of this release has chunks")
    install_schedules(Job(LgampConfig(), 0, {}))
    try:
        with pytest.raises(ConfigError, match="MambaModel takes no vp_stage, .*; set ds_lgamp.chunks_per_rank to 1"):
            MambaModel(cut_as(**cut), None, 8, 8)
        with pytest.raises(AttributeError, match="attention_backend"):
            MambaModel(cut_as(), None, 8, 8)
    finally:
        uninstall()


def cut_as(virtual=None, layout=None):
    """Returns as much of a TransformerConfig as says how its layers are cut."""
    return Namespace(virtual_pipeline_model_parallel_size=virtual, pipeline_model_parallel_layout=layout)


def model(**attributes):
    built = torch.nn.Module()
    built.embedding, built.output_layer = torch.nn.Module(), torch.nn.Linear(2, 2, bias=False)
    built.embedding.word_embeddings = torch.nn.Embedding(2, 2)
    built.share_embeddings_and_output_weights = True
    vars(built).update(attributes)
    return built


def batch_of(*models, **settings):
    return Namespace(models=models, iterators=[None] * len(models), pipeline_ranks=1, config=Namespace(**settings))
