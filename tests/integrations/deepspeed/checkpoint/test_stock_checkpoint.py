"""A run moves from stock DeepSpeed to a block and back, at other layouts, with unchanged losses."""

import pytest
import torch

from ds_lgamp.checkpoint.folder import write_latest
from ds_lgamp.checkpoint.whole import read_whole, write_whole
from ds_lgamp.integrations.deepspeed.checkpoint.stock_reader import read_stock
from ds_lgamp.integrations.deepspeed.checkpoint.stock_writer import write_stock
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.checkpoint.stock_runs import (
    AFTER,
    BEFORE,
    BLOCK_STEPS,
    Kind,
    Place,
    go_on,
    load_weights,
    train_and_save,
)
from tests.slow import chosen, slow_except

KINDS = {
    "fp32": Kind(),
    "bf16": Kind("bf16"),
    "bf16 fp32 gradients": Kind("bf16", options={"data_types": {"grad_accum_dtype": "fp32"}}),
    "fp16": Kind("fp16"),
    "stage 0": Kind(stage=0, tied=False),
    "a group on some ranks": Kind(stage=0, tied=False, pipeline_ranks=4, vocabulary_group=True),
}
DEFAULT = {"fp32", "bf16", "a group on some ranks"}
"""Kinds that are not slow."""
TAG = f"global_step{BEFORE}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stock")


@pytest.fixture(scope="module")
def stock(request, folder):
    """Returns the observations of every rank of a stock run, by kind. Ranks 0 and 1 are the first stage, 2 and 3 the
    second."""
    of_blocks = {BLOCKS[number][0] for number in chosen_blocks(request)}
    names = chosen(request, "name") | of_blocks | {"fp32"}
    ranks = run_on_ranks(4, train_and_save, {name: KINDS[name] for name in KINDS if name in names}, folder)
    return {name: [rank[name] for rank in ranks] for name in names}


@pytest.mark.parametrize("name", slow_except(DEFAULT, list(KINDS)))
def test_what_the_engine_holds_is_read(stock, folder, name):
    whole = read_stock(folder / name / TAG)
    groups = 3 if KINDS[name].vocabulary_group else 2
    for rank in stock[name]:
        for key, tensor in rank.masters.items():
            assert torch.equal(whole.parameters[key], tensor)
        for moment, tensors in rank.moments.items():
            for key, tensor in tensors.items():
                assert torch.equal(whole.moments[moment][key], tensor)
        assert whole.state["optimizer"]["groups"][0]["lr"] == rank.rates[0]
        counters = whole.state["counters"]
        assert (counters["global_steps"], counters["global_samples"], counters["skipped_steps"]) == rank.counters
        if name == "fp16":
            assert whole.state["loss_scaler"]["cur_scale"] == rank.loss_scale == 512
    held = set().union(*(rank.masters for rank in stock[name]))
    frozen = {"3.gain"} if KINDS[name].tied else set()
    assert set(whole.parameters) == held | frozen
    assert whole.state["optimizer"]["class"] == "AdamW"
    assert [float(scalars["step"]) for scalars in whole.state["optimizer"]["scalars"]] == [BEFORE] * groups
    assert whole.client_state == {"epoch": 4}
    assert whole.state["lr_scheduler"]["state"] == {"last_batch_iteration": BEFORE - 1}


def test_frozen_parameters_and_buffers_are_read(stock, folder):
    whole = read_stock(folder / "fp32" / TAG)
    described = whole.state["parameters"]
    assert described["3.gain"] == {"shape": [1], "group": None}
    assert whole.parameters["3.gain"].tolist() == [0.75]
    names = "tied_modules.embedding.weight", "1.inner.weight", "6.norm.bias"
    assert [described[name]["group"] for name in names] == [0, 0, 1]
    assert set(whole.buffers) == {"3.seen"} and whole.buffers["3.seen"].tolist() == [4 * BEFORE] * 2


@pytest.fixture(scope="module")
def alone(stock, folder):
    """Returns what every rank of a block has that loads only the weights of a stock run."""
    return run_on_ranks(4, load_weights, KINDS["fp32"], folder / "fp32")


def test_a_block_loads_the_weights_of_stock_files_as_they_are(alone, folder):
    """At any stage, with tied layers, frozen parameters and buffers."""
    whole = read_stock(folder / "fp32" / TAG)
    saved = whole.parameters | whole.buffers
    for stage in (1, 3):
        held = {name: tensor for found, _ in alone for name, tensor in found[stage][0].items()}
        assert held.keys() == saved.keys()
        for name, tensor in held.items():
            assert torch.equal(tensor, saved[name]), name
        assert all(found[stage][1] == {"epoch": 4} for found, _ in alone)
    sentences = {said for _, said in alone}
    assert len(sentences) == 1 and "is of another model" in sentences.pop()


@pytest.fixture(scope="module")
def rewritten(stock, folder):
    """Reads and rewrites the stock checkpoints. Returns the observations of stock runs that load them."""
    places = []
    for name in stock:
        kind, target = KINDS[name], folder / "rewritten" / name
        layout = kind.pipeline_ranks, 4 // kind.pipeline_ranks, kind.stage
        write_stock(read_stock(folder / name / TAG), target / "again", *layout)
        places.append((kind, Place(target, *layout), BLOCK_STEPS + AFTER, None))
    ranks = run_on_ranks(4, go_on, places)
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(stock)}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_stock_goes_on_with_what_was_written(stock, rewritten, name):
    for before, after in zip(stock[name], rewritten[name], strict=True):
        assert after.losses == before.losses[BEFORE:]
        for key, tensor in before.masters.items():
            assert torch.equal(after.masters[key], tensor)
        assert after.rates == before.rates and after.counters == before.counters
        assert after.loss_scale == before.loss_scale
        assert after.client_state["epoch"] == 4


BLOCKS = [
    ("fp32", (2, 2, 3), {"chunks_per_rank": 2}, 1e-6),
    ("fp32", (4, 1, 1), {"schedule": "1f1b"}, 1e-6),
    ("bf16", (2, 2, 2), {}, 3e-3),
    ("fp16", (1, 4, 3), {}, 1e-3),
    ("stage 0", (2, 2, 3), {}, 1e-6),
    ("a group on some ranks", (2, 2, 3), {}, 1e-6),
]


def leave_options_to_the_run(optimizer):
    """Removes options that a run must supply.

    DeepSpeed's FusedAdam saves fewer options than torch's class does, and so may an unknown class.
    """
    kept = {"lr", "betas", "eps", "weight_decay"}
    optimizer["class"] = None
    optimizer["groups"] = [{key: group[key] for key in kept} for group in optimizer["groups"]]


@pytest.fixture(scope="module")
def blocks(request, stock, folder):
    """Returns the observations of every rank of the runs with a block that load the converted checkpoints, by index of
    the block. Each run saves into its folder."""
    numbers, places = sorted(chosen_blocks(request)), []
    for index in numbers:
        name, layout, block, _ = BLOCKS[index]
        target = folder / f"block {index}"
        whole = read_stock(folder / name / TAG)
        if block == {"schedule": "1f1b"}:
            leave_options_to_the_run(whole.state["optimizer"])
        write_whole(target / TAG, whole)
        write_latest(target, TAG)
        places.append((KINDS[name], Place(target, *layout, block), BLOCK_STEPS, target))
    return [dict(zip(numbers, rank)) for rank in run_on_ranks(4, go_on, places)]


def chosen_blocks(request):
    """Returns the indices of the blocks that the tests need."""
    return chosen(request, "block") | {BACK[number][0] for number in chosen(request, "way_back")}


@pytest.mark.parametrize(
    "block", slow_except([number for number, (name, *_) in enumerate(BLOCKS) if name in DEFAULT], range(len(BLOCKS)))
)
def test_a_block_goes_on_where_stock_stopped(stock, blocks, block):
    name, _, _, tolerance = BLOCKS[block]
    for rank in blocks:
        before, after = stock[name][0], rank[block]
        assert after.losses == pytest.approx(before.losses[BEFORE : BEFORE + BLOCK_STEPS], rel=tolerance)
        assert after.rates[0] == before.rates[0] and after.counters == before.counters
        assert after.client_state == {"epoch": 4} and after.foreach is False
        if name == "fp16":
            assert after.loss_scale == 512


BACK = [
    # The index of the block, and the layout with its stage.
    (0, (2, 2, 1)),
    (0, (1, 4, 1)),
    (0, (4, 1, 1)),
    (1, (2, 2, 1)),
    (0, (2, 2, 0)),
    (2, (4, 1, 1)),
    (3, (2, 2, 1)),
    (4, (4, 1, 1)),
    (4, (1, 4, 0)),
    (5, (4, 1, 0)),
]


@pytest.fixture(scope="module")
def back(blocks, folder):
    """Returns the observations of stock runs that load the checkpoints of runs with a block."""
    places = []
    for index, (source, layout) in enumerate(BACK):
        name, target = BLOCKS[source][0], folder / f"back {index}"
        saved = folder / f"block {source}" / f"global_step{BEFORE + BLOCK_STEPS}"
        write_stock(read_whole(saved), target / "tag", *layout)
        places.append((KINDS[name], Place(target, *layout), AFTER, None))
    return run_on_ranks(4, go_on, places)


@pytest.mark.slow
@pytest.mark.parametrize("way_back", range(len(BACK)))
def test_stock_goes_on_where_a_block_stopped(stock, blocks, back, way_back):
    source, _ = BACK[way_back]
    name, _, _, tolerance = BLOCKS[source]
    for rank in back:
        assert rank[way_back].losses == pytest.approx(stock[name][0].losses[-AFTER:], rel=tolerance)
        assert rank[way_back].counters[0] == BEFORE + BLOCK_STEPS
