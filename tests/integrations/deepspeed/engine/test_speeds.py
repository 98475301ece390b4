"""Ranks of unlike speeds have chunks and batches of unlike sizes, and train like one process without parallelism."""

from itertools import product

import deepspeed
import pytest
import torch

import ds_lgamp
from ds_lgamp.config import ConfigError, LgampConfig
from ds_lgamp.integrations.deepspeed.engine.plan import replica_specs
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.test_user_code import Reporting
from tests.integrations.deepspeed.linear import linears
from tests.integrations.deepspeed.models import Training, layer_specs, seed, train_reference
from tests.integrations.deepspeed.running import Layout, initialize, train
from tests.runtime.test_equivalence import relative
from tests.slow import slow_except

PIPELINES = {
    1: {},
    2: {"pipeline_rank_speeds": [1, 2]},
    3: {"pipeline_rank_speeds": [3, 1, 2]},
}
REPLICAS = {
    1: {},
    2: {"data_rank_speeds": [3, 1]},
    3: {"data_rank_speeds": [1, 4, 1]},
}
ORDERS = {
    "layered": {},
    "chunks": {"chunks_per_rank": 2, "resident_chunks": 1},
    "contiguous": {"placement": "contiguous", "chunks_per_rank": 2},
    "1f1b": {"schedule": "1f1b"},
    "gpipe": {"schedule": "gpipe"},
}
GRIDS = [(2, 1), (3, 1), (1, 2), (1, 3), (2, 2), (3, 2), (2, 3)]


LAYER_TYPES = [getattr(getattr(layer, "typename", layer), "__name__", "") for layer in layer_specs(Training(blocks=8))]


def check(grid, stage, order, tied):
    training = Training(blocks=8, tied=tied, steps=2, clipping=0.3, momentum=0.9)
    block = {**PIPELINES[grid[0]], **REPLICAS[grid[1]], **ORDERS[order]}
    run = train(training, Layout(*grid, stage, block))
    reference = train_reference(training, grid[1])
    label = (grid, stage, order, tied)
    assert run.losses == pytest.approx(reference.losses, rel=1e-6), label
    assert run.norms == pytest.approx(reference.norms, rel=1e-6), label
    assert run.evaluation == pytest.approx(reference.evaluation, rel=1e-6), label
    for step, gradients in enumerate(run.gradients):
        for name, gradient in gradients.items():
            expected = reference.gradients[step][name]
            assert relative(gradient - expected, expected) < 2e-6, (label, step, name)
    return run.engine


def train_all(grid):
    """Every stage with another order. Returns the blocks of each pipeline rank, and the micro-batches of each
    data-parallel rank."""
    prepare_rank()
    orders = list(ORDERS)
    for stage in range(4):
        engine = check(grid, stage, orders[(stage + GRIDS.index(grid)) % len(orders)], tied=stage % 2 == 1)
    layout = engine.placed.layout
    blocks = [
        sum(LAYER_TYPES[layer] == "TupleBlock" for chunk in layout.chunks_of(rank) for layer in layout.layers(chunk))
        for rank in range(grid[0])
    ]
    return blocks, [replica.micro_batches for replica in engine.lgamp.replica_specs]


@pytest.mark.parametrize("grid", slow_except([(2, 2)], GRIDS), ids=str)
def test_training_equals_one_process(grid):
    """8 blocks, and 4 micro-batches for each data-parallel rank on average."""
    blocks, shares = run_on_ranks(grid[0] * grid[1], train_all, grid)[0]
    assert blocks == {1: [8], 2: [3, 5], 3: [4, 1, 3]}[grid[0]]
    assert shares == {1: [4], 2: [6, 2], 3: [2, 8, 2]}[grid[1]]


def train_full():
    prepare_rank()
    for stage, order, tied in product(range(4), ORDERS, (False, True)):
        check((2, 2), stage, order, tied)


@pytest.mark.full
def test_every_order_at_every_stage_trains_as_one_process():
    run_on_ranks(4, train_full, seconds=1500)


SAMPLES = [(torch.randn(6, generator=torch.Generator().manual_seed(row)), torch.zeros(6)) for row in range(42)]
"""With 4 rows each, 10 micro-batches and a half: an epoch ends within a step, and with fewer rows."""


def train_on_own_data(speeds):
    """Trains over two epochs. Returns the means of losses, and the loss of this rank's micro-batches."""
    ds_lgamp.install()
    with quiet():
        module = Reporting(linears(4), num_stages=1, seed_layers=True, seed_fn=seed)
        module.loss_fn = module.loss
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 3,
            "zero_optimization": {"stage": 3},
            "ds_lgamp": {} if speeds is None else {"data_rank_speeds": speeds},
        }
        optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, training_data=SAMPLES, config=config)
    told, own = [], []
    for step in range(5):
        if step == 3:
            # From here on 4 micro-batches for each rank, on average.
            engine.set_train_batch_size(32)
        loss = engine.train_batch().item()
        told.append([loss, *(float(value) for value in engine.get_additional_losses().values())])
        own.append(float(engine.dp_group_loss))
    return told, own, engine.placed.micro_offset, engine.own_data.pulled, engine.global_samples


def train_on_shares():
    prepare_rank()
    return train_on_own_data(None), train_on_own_data([2, 1])


@pytest.fixture(scope="module")
def shared():
    return run_on_ranks(2, train_on_shares)


def test_a_step_has_the_same_micro_batches_whatever_the_speeds(shared):
    for equal, unequal in shared:
        for told, expected in zip(unequal[0], equal[0]):
            assert told == pytest.approx(expected, rel=1e-5)
        assert unequal[3:] == equal[3:] == (17, 3 * 24 + 2 * 32)


def test_each_rank_knows_the_mean_of_its_own_losses(shared):
    (first, fast), (second, slow) = (([step[0] for step in run[0]], run[1]) for _, run in shared)
    assert first == second
    shares = [(4, 2)] * 3 + [(5, 3)] * 2
    for mean, quick, late, (more, fewer) in zip(first, fast, slow, shares):
        assert (more * quick + fewer * late) / (more + fewer) == pytest.approx(mean, rel=1e-6)


def test_seeds_of_micro_batches_stay_alike_on_all_ranks_and_differ_between_steps(shared):
    """Stock's kind of seed counts micro-batches from here on: the most that a rank had."""
    assert [run[2] for _, run in shared] == [3 * 4 + 2 * 5] * 2


def refusals():
    """Groups at stages that gather or reduce once per group, and rounds of interleaved 1F1B that are not complete."""
    prepare_rank()
    said = []
    for stage, block in ((3, {"micro_batch_group": 2}), (2, {"micro_batch_group": 3})):
        with pytest.raises(ConfigError) as error:
            initialize(Training(blocks=8), Layout(1, 2, stage, {"data_rank_speeds": [3, 1], **block}))
        said.append(str(error.value))
    interleaved = {"data_rank_speeds": [5, 3], "schedule": "interleaved_1f1b"}
    with pytest.raises(ConfigError) as error:
        replica_specs(LgampConfig(**interleaved), (0, 1), 2, 0, 4, updates="step")
    said.append(str(error.value))
    assert [
        spec.micro_batches for spec in replica_specs(LgampConfig(**interleaved), (0, 1), 2, 0, 8, updates="step")
    ] == [10, 6]
    parts = LgampConfig(data_rank_speeds=[3, 1], split_backward=True)
    with pytest.raises(ConfigError) as error:
        replica_specs(parts, (0, 1, 2, 0, 1, 2), 2, 2, 4, updates="step")
    said.append(str(error.value))
    return said


@pytest.mark.slow
def test_ranks_that_would_communicate_in_other_orders_are_refused():
    *of_groups, of_rounds, of_parts = run_on_ranks(2, refusals)[0]
    assert of_parts.endswith(
        "with ds_lgamp.split_backward, their ranks would gather and reduce in other orders; remove split_backward"
    )
    assert of_rounds.startswith(
        "ds_lgamp.data_rank_speeds is [5.0, 3.0], which makes 3 to 5 micro-batches of a step, b"
    )
    for stage, said in zip((3, 2), of_groups):
        assert said.startswith("ds_lgamp.data_rank_speeds is [3.0, 1.0], which makes 2 to 6 micro-batches of a step: ")
        assert f"at ZeRO stage {stage}, their ranks would gather and reduce in other orders; use" in said
