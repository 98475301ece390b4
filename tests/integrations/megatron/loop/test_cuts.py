"""How flags and the block cut the layers of Megatron-LM's models into chunks."""

import re

import pytest

from ds_lgamp.config import ConfigError, LgampConfig, read_block
from ds_lgamp.integrations.megatron.loop.arguments import check_file, validate_with_block
from ds_lgamp.integrations.megatron.loop.cuts import chunk_sizes, cut, layout_of
from tests.integrations.megatron.loop.test_arguments import (
    EACH,
    EMBEDDING,
    FIRST,
    LAST,
    LOSS,
    VIRTUAL,
    flags,
    validated,
)


@pytest.mark.parametrize(
    ("block", "ranks", "layers", "layout"),
    [
        ({}, 2, 8, "Et|t|t|t|t|t|t|tL"),
        ({}, 2, 7, "Ett|t|t|t|t|tL"),
        ({}, 1, 3, "Et|t|tL"),
        ({"chunks_per_rank": 2}, 2, 8, "Ett|tt|tt|ttL"),
        ({"chunks_per_rank": 3}, 1, 8, "Ettt|ttt|ttL"),
        ({"layers_per_chunk": 3}, 2, 11, "Ettt|ttt|ttt|ttL"),
        ({"schedule": "1f1b"}, 3, 8, "Ettt|ttt|ttL"),
        ({"schedule": "1f1b"}, 2, 8, None),
        ({"schedule": "gpipe"}, 1, 8, None),
        ({"chunks_per_rank": 1}, 4, 8, None),
        ({"pipeline_rank_speeds": [1, 3]}, 2, 8, "Et|ttt|t|tttL"),
        ({"pipeline_rank_speeds": [3, 1], "chunks_per_rank": 1}, 2, 8, "Etttttt|ttL"),
        ({"pipeline_rank_speeds": [1, 1], "schedule": "1f1b"}, 2, 8, None),
    ],
)
def test_the_block_cuts_every_layer_into_some_chunk(block, ranks, layers, layout):
    args = flags(pipeline_model_parallel_size=ranks, num_layers=layers, data_parallel_size=1)
    args, _ = validated(args, {"ds_lgamp": block})
    assert args.pipeline_model_parallel_layout == layout
    chunks = layout.count("|") + 1 if layout else ranks
    assert (args.virtual_pipeline_model_parallel_size or 1) * ranks == chunks
    # With one pipeline rank, Megatron-LM would reset the flags that gather whole chunks.
    assert args.align_param_gather is (chunks > ranks)


@pytest.mark.parametrize(
    ("given", "block", "ranks", "layers", "layout"),
    [
        ({VIRTUAL: 2}, {}, 2, 8, "Ett|tt|tt|ttL"),
        ({VIRTUAL: 2}, {}, 1, 8, "Etttt|ttttL"),
        ({VIRTUAL: 1}, {}, 2, 8, None),
        ({EACH: 1}, {}, 2, 4, "Et|t|t|tL"),
        ({EACH: 4}, {}, 2, 8, None),
        ({FIRST: 2}, {}, 2, 8, "Et|ttt|t|tttL"),
        ({FIRST: 2}, {"chunks_per_rank": 1}, 2, 8, None),
        ({FIRST: 2}, {"schedule": "1f1b"}, 2, 8, None),
        ({FIRST: 4, LAST: 2, VIRTUAL: 2}, {}, 4, 14, "Ett|tt|tt|t|tt|tt|tt|tL"),
        ({LAST: 2}, {"chunks_per_rank": 2}, 3, 10, "Ett|tt|t|tt|tt|tL"),
        ({EMBEDDING: True, LOSS: True}, {"chunks_per_rank": 2}, 2, 6, "Et|tt|tt|tL"),
        ({EMBEDDING: True, LOSS: True}, {}, 1, 2, "E|t|t|L"),
        ({LOSS: True, EACH: 2}, {}, 2, 7, "Ett|tt|tt|tL"),
    ],
)
def test_flags_cut_the_layers_as_in_megatron_core(given, block, ranks, layers, layout):
    given = {"pipeline_model_parallel_size": ranks, "num_layers": layers, "data_parallel_size": 1, **given}
    args, _ = validated(flags(**given), {"ds_lgamp": block})
    assert args.pipeline_model_parallel_layout == layout
    # Megatron-core takes no other cut beside a layout. Without one, it reads the flags itself.
    for name in (VIRTUAL, EACH, FIRST, LAST, EMBEDDING, LOSS):
        default = flags().__dict__[name]
        assert getattr(args, name) == (given.get(name, default) if layout is None else default)


def test_a_layout_of_the_users_is_kept():
    args, _ = validated(flags(pipeline_model_parallel_layout="Ett|tt|tt|ttL"), {"ds_lgamp": {}})
    assert args.pipeline_model_parallel_layout == "Ett|tt|tt|ttL"


def test_layouts_are_megatrons():
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    sizes = chunk_sizes(LgampConfig(chunks_per_rank=2), 11, 3)
    layout = PipelineParallelLayerLayout(layout_of(sizes), 3)
    layout.validate_layer_layout(num_layers=11, mtp_num_layers=None)
    assert sizes == [2, 2, 2, 2, 2, 1] and layout.virtual_pipeline_model_parallel_size == 2


def of_pattern(pattern, **given):
    return flags(**{"num_layers": None, "hybrid_layer_pattern": pattern, "hybrid_override_pattern": None, **given})


@pytest.mark.parametrize(
    ("pattern", "block", "cut_pattern"),
    [
        ("M-M*M-M-", {"chunks_per_rank": 2}, "M-|M*|M-|M-"),
        ("M-M*M-M-", {"chunks_per_rank": 3}, "M-|M*|M|-|M|-"),
        ("M|-M*|M-|M-", {}, "M|-M*|M-|M-"),
        ("M-M*/MM/MM", {"schedule": "1f1b"}, "M-|M*/MM/MM"),
    ],
)
def test_a_pattern_of_layers_is_cut_as_it_says_or_as_the_block_does(pattern, block, cut_pattern):
    chosen = cut(of_pattern(pattern), read_block({"ds_lgamp": block}))
    chunks = cut_pattern.count("|") + 1
    assert chosen == (chunks, cut_pattern, "hybrid_layer_pattern", cut_pattern.replace("|", ""))


def test_a_pattern_under_its_old_name_gets_the_new_one():
    args = of_pattern(None, hybrid_override_pattern="M-M*")
    assert cut(args, read_block({"ds_lgamp": {"chunks_per_rank": 2}})).value == "M|-|M|*"
    assert args.hybrid_override_pattern is None


def test_megatron_lm_validates_the_pattern_of_one_rank_without_its_cuts():
    seen, config = [], {"ds_lgamp": {}}
    args = of_pattern("M-|M*", pipeline_model_parallel_size=1)
    job = check_file(config, read_block(config))
    validate_with_block(args, job, lambda: seen.append(args.hybrid_layer_pattern))
    assert seen == ["M-M*"]
    assert (args.hybrid_layer_pattern, args.virtual_pipeline_model_parallel_size) == ("M-|M*", 2)


@pytest.mark.parametrize(
    ("pattern", "given", "block", "words"),
    [
        ("M-|M*", {}, {"chunks_per_rank": 2}, "ds_lgamp.chunks_per_rank both cut the layers"),
        (
            "M-M*",
            {"decoder_first_pipeline_num_layers": 1},
            {},
            "--decoder-first-pipeline-num-layers both cut the layers",
        ),
        (
            "M-M*",
            {"pipeline_model_parallel_layout": "Et|tL"},
            {},
            "--pipeline-model-parallel-layout both cut the layers",
        ),
        ("M|-|M|*/MM", {}, {}, "is 'M|-|M|*/MM', whose layers behind '/' have not been tried beside several chunks"),
    ],
)
def test_a_pattern_that_something_else_cuts_is_refused(pattern, given, block, words):
    with pytest.raises(ConfigError, match=f"^--hybrid-layer-pattern .*{re.escape(words)}"):
        cut(of_pattern(pattern, **given), read_block({"ds_lgamp": block}))
