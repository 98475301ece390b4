"""With patched hosts nothing is replaced at run time. Only ``pytest --patched`` with this file's name collects these
tests."""

from typing import Any, NamedTuple

import pytest

import ds_lgamp
from ds_lgamp.config import LgampConfig
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.config.bad_input import merged
from tests.integrations.deepspeed.config.bad_modules import MODULES, pipeline
from tests.integrations.deepspeed.config.test_bad_input import refusal
from tests.integrations.deepspeed.engine.test_equivalence import check, pairwise_cases
from tests.integrations.deepspeed.hook.test_install import READER, attributes_of, differences
from tests.integrations.deepspeed.models import Training as DeepSpeedTraining
from tests.integrations.deepspeed.running import Layout, initialize
from tests.integrations.megatron.training_loop import STOCK, Place, Training, prepare_process, train_all

GRID = (2, 1)
OTHER_MODULES = ("a plain module", "a module with a schedule of its own")


def deepspeed_with_its_registry():
    prepare_rank()
    import deepspeed
    from deepspeed.runtime.engine_registry import _engine_factories

    from ds_lgamp.integrations.deepspeed.hook.initialize import partition_method_of

    before = attributes_of("deepspeed")
    ds_lgamp.install()
    assert len(_engine_factories) == 1
    replaced = differences(before, attributes_of("deepspeed"))
    stock = initialize(DeepSpeedTraining(), Layout(*GRID, stage=1, block=None))
    assert type(stock) is deepspeed.PipelineEngine is deepspeed.runtime.pipe.engine.PipelineEngine
    for case in [case for case in pairwise_cases() if case["grid"] == GRID][:3]:
        check(case)
    assert partition_method_of(pipeline(partition_method="uniform")) == "uniform"
    refusals = {name: refusal(merged({}), MODULES[name][0]()) for name in OTHER_MODULES}
    ds_lgamp.uninstall()
    return replaced, len(_engine_factories), refusals


def test_deepspeed_stays_as_it_is_and_trains_with_a_block_as_one_process_does():
    for replaced, left, refusals in run_on_ranks(2, deepspeed_with_its_registry):
        assert replaced == {READER} and left == 0
        assert all(MODULES[name][1] in sentence for name, sentence in refusals.items())


CUTS = [
    *({"num_layers": layers, "virtual_pipeline_model_parallel_size": 3} for layers in (3, 12)),
    {"num_layers": 5, "virtual_pipeline_model_parallel_size": 3, "account_for_embedding_in_pipeline_split": True},
    {"num_layers": 7, "virtual_pipeline_model_parallel_size": 4, "account_for_loss_in_pipeline_split": True},
    {
        "num_layers": 6,
        "virtual_pipeline_model_parallel_size": 4,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    },
    {"num_layers": 7, "pipeline_model_parallel_layout": "Ettt|tt|ttL"},
    {"num_layers": 6, "pipeline_model_parallel_layout": "E|tt||ttttL"},
]
ALONE, CHUNKS = Place(1, 1, STOCK), Place(1, 4, "layered")


class Megatron(NamedTuple):
    """What a patched Megatron-core did."""

    replaced: set[tuple[str, str]]
    left: set[tuple[str, str]]
    selected: list[tuple[list[dict[str, Any]], str]]
    counted: list[list[Any]]
    trained: dict[Place, list[Any]]
    tied: tuple[bool, list[str], list[str], list[str]]


def megatron_with_its_registry():
    # Imports a part of megatron first that the installation imports, because this does not count as a replacement.
    import megatron.core.models.mamba  # noqa: F401
    from megatron.core.pipeline_parallel import schedules

    from ds_lgamp.integrations.megatron.loop.arguments import Job
    from ds_lgamp.integrations.megatron.loop.install import install_schedules, uninstall

    before = attributes_of("megatron")
    install_schedules(Job(LgampConfig(), 0, {}))
    replaced = differences(before, attributes_of("megatron"))
    uninstall()
    selected = [schedule_selected(schedules, answer) for answer in (None, "a schedule")]
    left = differences(before, attributes_of("megatron"))
    return Megatron(
        replaced, left, selected, [layers_of_chunks(cut) for cut in CUTS], train_all([ALONE, CHUNKS]), tied_chunks()
    )


def schedule_selected(schedules, answer):
    """Returns the arguments that a selector gets, and the name of the function chosen if it returns ``answer``."""
    given = []

    def select(**arguments):
        given.append(arguments)
        return answer

    schedules.register_forward_backward_func(select)
    chosen = schedules.get_forward_backward_func(4, vp_size=2)
    schedules.register_forward_backward_func(None)
    assert schedules.get_forward_backward_func(1, None) is schedules.forward_backward_no_pipelining
    return given, getattr(chosen, "__name__", chosen)


def tied_chunks():
    """Builds chunks with tied embeddings. Returns whether the last computes with the weight of the first, and what is
    the last chunk's own: parameters, entries of its checkpoint, and replaced attributes."""
    from megatron.core.utils import unwrap_model

    models = unwrap_model(Training(CHUNKS).models)
    first, last = models[0], models[-1]
    shared = last.shared_embedding_or_output_weight() is first.embedding.word_embeddings.weight
    parameters = [name for name, _ in last.named_parameters() if "layers" not in name]
    entries = [name for name in last.sharded_state_dict() if "weight" in name and "layers" not in name]
    return shared, parameters, entries, [name for name in vars(last) if callable(getattr(type(last), name, None))]


def layers_of_chunks(cut):
    """Returns the number of layers of each chunk of one rank, and of the layers before it: Megatron-core's answer and
    ds_lgamp's."""
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig, transformer_block, transformer_layer

    from ds_lgamp.integrations.megatron.loop import several_chunks as ours

    config = TransformerConfig(hidden_size=8, num_attention_heads=1, **cut)
    chunks = config.virtual_pipeline_model_parallel_size
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(virtual_pipeline_model_parallel_size=chunks)
    functions = [
        (transformer_block.get_num_layers_to_build, transformer_layer.get_transformer_layer_offset),
        (ours.get_num_layers_to_build, ours.get_transformer_layer_offset),
    ]
    return [[(layers(config, stage), offset(config, stage)) for stage in range(chunks)] for layers, offset in functions]


@pytest.fixture(scope="module")
def megatron():
    return run_on_ranks(1, megatron_with_its_registry, before_init=prepare_process)[0]


def test_megatron_stays_as_it_is_but_for_the_registered_selector_and_a_refusal_of_mamba(megatron):
    assert megatron.replaced == {
        ("megatron.core.pipeline_parallel.schedules", "_FORWARD_BACKWARD_FUNC_SELECTOR"),
        ("megatron.core.models.mamba", "MambaModel", "__init__"),
        ("megatron.core.models.mamba.mamba_model", "MambaModel", "__init__"),
    }
    assert megatron.left == set()


def test_megatron_asks_the_registered_selector_which_may_decline(megatron):
    (given, stock), (_, chosen) = megatron.selected
    assert len(given) == 1 and given[0].items() >= {"pp_size": 4, "vp_size": 2}.items()
    assert stock == "forward_backward_pipelining_with_interleaving" and chosen == "a schedule"


def test_the_last_chunk_of_a_rank_computes_with_the_tied_embedding_of_the_first(megatron):
    shared, parameters, entries, replaced = megatron.tied
    assert shared and replaced == []
    norm = ["decoder.final_layernorm.weight"]
    assert [name for name in parameters if name.endswith("weight")] == entries == norm


def test_megatron_cuts_one_rank_into_chunks_as_the_replacements_do(megatron):
    for cut, (patched, ours) in zip(CUTS, megatron.counted, strict=True):
        assert patched == ours, cut
        assert sum(layers for layers, _ in patched) == cut["num_layers"]


def test_several_chunks_on_one_rank_train_as_one_does(megatron):
    for step, expected in zip(megatron.trained[CHUNKS], megatron.trained[ALONE], strict=True):
        assert (step.loss, step.norm) == pytest.approx((expected.loss, expected.norm), rel=1e-5)
