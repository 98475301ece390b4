"""Every example configuration trains, and stock DeepSpeed trains alike without the block."""

import json

import deepspeed
import pytest

import ds_lgamp
from testing import ROOT
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.models import Training, pipeline_module
from tests.runtime.models import micro_batch

EXAMPLES = sorted((ROOT / "example_configs").glob("*.json"))
FLAGS = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}
"""launch/pretrain_gpt.py adds these to the quickstart's configuration, launch/pretrain_bert.py to that of BERT."""
COMPLETED = ("quickstart", "bert")
"""The beginnings of such configurations. Adam takes the place of BERT's LAMB, which stock has for GPUs only."""
TRAINING = Training(tuples=False)


def without_block(config):
    """Returns the stock configuration with torch's Adam. DeepSpeed would compile its own."""
    stock = {key: value for key, value in config.items() if key != "ds_lgamp"}
    optimizer = {**config["optimizer"], "params": {**config["optimizer"]["params"], "torch_adam": True}}
    return {**stock, "optimizer": optimizer, "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}}


def losses_of(config, pipeline_ranks):
    with quiet():
        module = pipeline_module(TRAINING, pipeline_ranks)
        engine = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)[0]
    losses = []
    for step in range(4):
        first = 8 * engine.grid.data_parallel_id
        data = iter([micro_batch(step, first + index) for index in range(8)])
        losses.append(engine.train_batch(data).item())
    return type(engine).__name__, losses


def train_all():
    prepare_rank()
    ds_lgamp.install()
    runs = {}
    for path in EXAMPLES:
        config = json.loads(path.read_text())
        if path.stem.startswith(COMPLETED):
            config = {**FLAGS, **config, "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}}
        pipeline_ranks = 1 if path.stem == "lga" else 2
        runs[path.stem] = losses_of(config, pipeline_ranks), losses_of(without_block(config), pipeline_ranks), config
    return runs


@pytest.fixture(scope="module")
def runs():
    return run_on_ranks(4, train_all)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.stem for path in EXAMPLES])
def test_the_example_trains_like_stock(runs, name):
    (engine, losses), (stock_engine, stock_losses), config = runs[name]
    assert engine == ("LgampEngine" if "ds_lgamp" in config else "PipelineEngine")
    assert stock_engine == "PipelineEngine"
    half = config.get("bf16", {}).get("enabled", False)
    assert losses == pytest.approx(stock_losses, rel=5e-3 if half else 1e-5)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_says_what_it_is_for(path):
    about = json.loads(path.read_text())["about"]
    assert about and all(isinstance(line, str) and len(line) <= 130 for line in about)
