"""A stock DeepSpeed run switches over to the block and back, at other layouts, and its losses do not show where."""

import pickle
from functools import partial
from pathlib import Path

import pytest
import torch

from ds_lgamp.checkpoint.errors import CheckpointError
from ds_lgamp.integrations.deepspeed.stock_reader import read_stock
from ds_lgamp.integrations.deepspeed.stock_writer import write_stock
from tests.engine.stock_runs import AFTER, BEFORE, BLOCK_STEPS, Kind, Place, go_on, train_and_save
from tests.ranks import run_on_ranks

KINDS = {
    "fp32": Kind(),
    "bf16": Kind("bf16"),
    "bf16 fp32 gradients": Kind("bf16", options={"data_types": {"grad_accum_dtype": "fp32"}}),
    "fp16": Kind("fp16"),
    "fp16 static scale": Kind("fp16", options={}),
    "stage 0": Kind(stage=0, tied=False),
}
del KINDS["fp16 static scale"]
TAG = f"global_step{BEFORE}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stock")


@pytest.fixture(scope="module")
def stock(folder):
    """By kind, what every rank of a stock run has seen; rank 0 and 1 are the first stage, 2 and 3 the second."""
    ranks = run_on_ranks(4, train_and_save, KINDS, folder)
    return {name: [rank[name] for rank in ranks] for name in KINDS}


@pytest.mark.parametrize("name", KINDS)
def test_what_the_engine_holds_is_read(stock, folder, name):
    whole = read_stock(folder / name / TAG)
    for rank in reversed(stock[name]):
        for key, tensor in rank.masters.items():
            assert torch.equal(whole.parameters[key], tensor)
        for moment, tensors in rank.moments.items():
            for key, tensor in tensors.items():
                assert torch.equal(whole.moments[moment][key], tensor)
        assert [group["lr"] for group in whole.state["optimizer"]["groups"]] == rank.rates
        counters = whole.state["counters"]
        assert (counters["global_steps"], counters["global_samples"], counters["skipped_steps"]) == rank.counters
        if name == "fp16":
            assert whole.state["loss_scaler"]["cur_scale"] == rank.loss_scale == 512
    held = set().union(*(rank.masters for rank in stock[name]))
    frozen = {"3.gain"} if KINDS[name].tied else set()
    assert set(whole.parameters) == held | frozen
    assert whole.state["optimizer"]["class"] == "AdamW"
    assert [float(scalars["step"]) for scalars in whole.state["optimizer"]["scalars"]] == [BEFORE] * 3
    assert whole.client_state == {"epoch": 4}
    assert whole.state["lr_scheduler"] == {"last_batch_iteration": BEFORE - 1}


def test_frozen_parameters_and_buffers_are_read(stock, folder):
    whole = read_stock(folder / "fp32" / TAG)
    described = whole.state["parameters"]
    assert described["3.gain"] == {"shape": [1], "group": None}
    assert whole.parameters["3.gain"].tolist() == [0.75]
    assert [described[name]["group"] for name in ("tied_modules.embedding.weight", "1.inner.weight", "6.norm.bias")] == [
        0,
        1,
        2,
    ]
    assert set(whole.buffers) == {"3.seen"} and whole.buffers["3.seen"].tolist() == [4 * BEFORE] * 2


@pytest.fixture(scope="module")
def rewritten(stock, folder):
    """What stock runs see that load what was read and written again."""
    places = []
    for name, kind in KINDS.items():
        target = folder / "rewritten" / name
        write_stock(read_stock(folder / name / TAG), target / "again", 2, 2, kind.stage)
        places.append((kind, Place(target, stage=kind.stage), BLOCK_STEPS + AFTER, None))
    ranks = run_on_ranks(4, go_on, places)
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(KINDS)}


@pytest.mark.parametrize("name", KINDS)
def test_stock_goes_on_with_what_was_written(stock, rewritten, name):
    for before, after in zip(stock[name], rewritten[name], strict=True):
        assert after.losses == before.losses[BEFORE:]
        for key, tensor in before.masters.items():
            assert torch.equal(after.masters[key], tensor)
        assert after.rates == before.rates and after.counters == before.counters
        assert after.loss_scale == before.loss_scale
        assert after.client_state["epoch"] == 4
