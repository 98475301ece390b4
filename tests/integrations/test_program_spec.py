import pytest

from ds_lgamp.config import ConfigError, read_block
from ds_lgamp.integrations.program_spec import chunk_bounds, micro_batch_shares, place, program_spec

TYPES = ["embedding", "block", "block", "block", "block", "norm", "head"]
WEIGHTS = [4.0, 1, 1, 1, 1, 0, 4]


def test_an_empty_block_means_layered_modular_automatic():
    settings = read_block({"ds_lgamp": {}})
    bounds = chunk_bounds(settings, 2, TYPES, WEIGHTS)
    placement = place(settings, len(bounds) - 1, 2)
    spec = program_spec(settings, placement, 8, 3)
    assert bounds == [0, 2, 3, 4, 7] and placement == (0, 1, 0, 1)
    assert (spec.schedule, spec.micro_batch_group, spec.resident_chunks) == ("layered", 8, 2)


@pytest.mark.parametrize(
    ("block", "bounds"),
    [({"layers_per_chunk": 3}, [0, 3, 6, 7]), ({"chunks_per_rank": 2}, [0, 1, 3, 6, 7])],
)
def test_chunks_by_count_and_by_weight(block, bounds):
    assert chunk_bounds(read_block({"ds_lgamp": block}), 2, TYPES, WEIGHTS) == bounds


@pytest.mark.parametrize("blocks", range(1, 12))
@pytest.mark.parametrize("ranks", range(1, 6))
def test_the_last_rank_has_the_loss_of_automatic_chunks(blocks, ranks):
    """However many blocks there are. Scripts for stock DeepSpeed look for the loss there."""
    types = ["embedding", *["block"] * blocks, "head"]
    for block in ({}, {"placement": "contiguous"}, {"schedule": "interleaved_1f1b"}):
        settings = read_block({"ds_lgamp": block})
        if blocks < ranks:
            continue
        bounds = chunk_bounds(settings, ranks, types, [])
        placement = place(settings, len(bounds) - 1, ranks)
        assert placement[-1] == ranks - 1
        assert len(placement) == (blocks if "placement" in block else blocks - blocks % ranks)
        sizes = [end - start for start, end in zip(bounds[1:-1], bounds[2:-1])]
        assert all(size in (1, 2) for size in sizes) and bounds[-1] == blocks + 2


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_schedules_of_one_chunk_per_rank_are_contiguous(schedule):
    settings = read_block({"ds_lgamp": {"schedule": schedule}})
    assert settings.one_chunk_per_rank and place(settings, 4, 4) == (0, 1, 2, 3)


@pytest.mark.parametrize("more", [{}, {"chunks_per_rank": 2}, {"placement": "vee"}])
def test_zbv_cuts_two_chunks_per_rank_by_weight_and_places_them_as_a_vee(more):
    settings = read_block({"ds_lgamp": {"schedule": "zbv", **more}})
    bounds = chunk_bounds(settings, 2, TYPES, WEIGHTS)
    assert bounds == [0, 1, 3, 6, 7] and place(settings, 4, 2) == (0, 1, 1, 0)
    assert program_spec(settings, (0, 1, 1, 0), 3, 1).loss_rank == 0


def test_chunks_of_zbv_follow_speeds():
    settings = read_block({"ds_lgamp": {"schedule": "zbv", "pipeline_rank_speeds": [1, 3]}})
    assert chunk_bounds(settings, 2, ["block"] * 8, []) == [0, 1, 4, 7, 8]


@pytest.mark.parametrize(
    ("block", "ranks", "message"),
    [
        (
            {"layers_per_chunk": 9},
            2,
            "ds_lgamp.layers_per_chunk is 9, which cuts 7 layers into 1 chunks for 2 pipeline ranks; use at most 6",
        ),
        ({"layers_per_chunk": 4}, 3, "layers_per_chunk is 4, which cuts 7 layers into 2 chunks .*; use at most 3$"),
        (
            {},
            5,
            "neither ds_lgamp.chunks_per_rank nor ds_lgamp.layers_per_chunk is given, which cuts 7 layers into 4 "
            "chunks for 5 pipeline ranks; set ds_lgamp.chunks_per_rank",
        ),
        ({}, 8, "num_stages of the PipelineModule is 8, but it has 7 layers; use at most as many"),
        (
            {"schedule": "interleaved_1f1b", "layers_per_chunk": 3},
            2,
            "layers_per_chunk is 3, which cuts 7 layers into 3 chunks, but schedule 'interleaved_1f1b' needs a "
            "multiple of 2 pipeline ranks; set ds_lgamp.chunks_per_rank instead",
        ),
    ],
)
def test_chunks_that_do_not_fit_the_ranks_are_refused_by_their_key(block, ranks, message):
    with pytest.raises(ConfigError, match=message):
        chunk_bounds(read_block({"ds_lgamp": block}), ranks, TYPES, WEIGHTS)


def test_the_most_layers_per_chunk_that_an_error_names_do_fit():
    for layers in range(2, 12):
        for ranks in range(2, layers + 1):
            with pytest.raises(ConfigError) as refused:
                chunk_bounds(read_block({"ds_lgamp": {"layers_per_chunk": layers}}), ranks, TYPES[:1] * layers, [])
            most = int(str(refused.value).split()[-1])
            cuts = [read_block({"ds_lgamp": {"layers_per_chunk": count}}) for count in (most, most + 1)]
            assert len(chunk_bounds(cuts[0], ranks, TYPES[:1] * layers, [])) > ranks
            with pytest.raises(ConfigError):
                chunk_bounds(cuts[1], ranks, TYPES[:1] * layers, [])


def test_more_chunks_than_layers_are_refused():
    with pytest.raises(ConfigError, match="ds_lgamp.chunks_per_rank is 4: 2 pipeline ranks would need 8 layers"):
        chunk_bounds(read_block({"ds_lgamp": {"chunks_per_rank": 4}}), 2, TYPES, WEIGHTS)


def test_a_batch_that_does_not_interleave_is_refused():
    settings = read_block({"ds_lgamp": {"schedule": "interleaved_1f1b"}})
    with pytest.raises(ConfigError, match="needs a multiple of 2 .* but a batch has 3 .gradient_accumulation_steps"):
        program_spec(settings, (0, 1, 0, 1), 3, 1)


def test_a_step_of_absurdly_many_micro_batches_is_refused():
    settings = read_block({"ds_lgamp": {}})
    with pytest.raises(ConfigError, match="makes 1099511627776 micro-batches of a step.*; use at most 100000"):
        program_spec(settings, (0, 1), 2**40, 1)
    with pytest.raises(ConfigError, match="use at most 100000"):
        micro_batch_shares(read_block({"ds_lgamp": {"data_rank_speeds": [1.0, 2.0]}}), 2**40, 2)
