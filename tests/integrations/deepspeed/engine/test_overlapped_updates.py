"""With ``overlap_update``, a run is the same to the bit as with one update of all chunks per step."""

from functools import cache, partial
from itertools import product

import deepspeed
import pytest
import torch

import ds_lgamp
from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.runtime.batch import ActionError
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.exact_runs import (
    GRIDS,
    OPTIMIZERS,
    PRECISIONS,
    STEPS,
    assert_equal_runs,
    check_all,
    numbers_of_step,
    run_of,
    trains,
)
from tests.integrations.deepspeed.models import (
    MICRO_BATCHES,
    Training,
    decay_groups,
    pipeline_module,
    scaled_weights,
)
from tests.integrations.deepspeed.running import batches
from tests.pairwise import pairwise

BLOCKS = {
    "layered": {},
    "groups": {"micro_batch_group": 3, "resident_chunks": 1},
    "deferred": {"defer_gathers": True, "chunks_per_rank": 2},
    "1f1b": {"schedule": "1f1b"},
}
NODE_BLOCKS = {
    "groups": {"micro_batch_group": 2, "resident_chunks": 1},
    "deferred": {"defer_gathers": True, "chunks_per_rank": 2},
    "speeds": {"data_rank_speeds": [3, 1, 2, 2]},
    "reproducible": {"reproducible": True},
}
FACTORS = {
    "grid": GRIDS,
    "stage": [0, 1, 2, 3],
    "block": list(BLOCKS),
    "optimizer": list(OPTIMIZERS),
    "precision": list(PRECISIONS),
    "clipping": [0.0, 0.3],
    "tied": [False, True],
}


def engine_of(case, overlap_update):
    pipeline_ranks, _ = case["grid"]
    nodes = {case["nodes"]: 2} if "nodes" in case else {}
    training = Training(blocks=5, tied=case["tied"], tuples=False)
    ds_lgamp.install()
    with quiet():
        module = pipeline_module(training, pipeline_ranks)
        scaled_weights(module.named_parameters())
        optimizer = OPTIMIZERS[case["optimizer"]](decay_groups(module.parameters(), 0.01))
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": case["clipping"],
            "zero_optimization": {"stage": case["stage"], **nodes},
            **PRECISIONS[case["precision"]],
            "ds_lgamp": {**(NODE_BLOCKS if nodes else BLOCKS)[case["block"]], "overlap_update": overlap_update},
        }
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def train(case, overlap_update):
    """Trains, and evaluates at the end."""
    engine = engine_of(case, overlap_update)
    numbers = [numbers_of_step(engine, step) for step in range(STEPS)]
    engine.eval_batch(batches(99, engine, training=False))
    return run_of(engine, numbers)


def check(case):
    assert_equal_runs(case, train(case, True), train(case, False))


@cache
def chosen_cases():
    return pairwise([*filter(trains, (dict(zip(FACTORS, values)) for values in product(*FACTORS.values())))])


def run_cases(grid, cases):
    ranks = grid[0] * grid[1]
    assert run_on_ranks(ranks, check_all, check, cases) == [len(cases)] * ranks


TYPICAL = [
    {"block": "layered", "optimizer": "adamw", "precision": "fp32", "stage": 1, "clipping": 0.0},
    {"block": "groups", "optimizer": "fused", "precision": "bf16", "stage": 2, "clipping": 0.3},
    {"block": "layered", "optimizer": "sgd", "precision": "fp16", "stage": 3, "clipping": 0.0},
]
"""Updates behind reductions, in the next step, and in the next step with steps that are skipped."""


def test_the_result_is_that_of_one_update_per_step():
    run_cases((1, 2), [{**case, "grid": (1, 2), "tied": True} for case in TYPICAL])


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_result_of_every_pair_of_factors_is_that_of_one_update_per_step(grid):
    run_cases(grid, [case for case in chosen_cases() if case["grid"] == grid])


HPZ, MICS = "zero_hpz_partition_size", "mics_shard_size"
ON_NODES = [
    {"nodes": HPZ, "block": "speeds", "optimizer": "adamw", "precision": "fp32", "clipping": 0.0, "tied": True},
    {"nodes": MICS, "block": "groups", "optimizer": "sgd", "precision": "bf16", "clipping": 0.0, "tied": True},
    {"nodes": HPZ, "block": "deferred", "optimizer": "sgd", "precision": "fp16", "clipping": 0.0, "tied": True},
    {"nodes": MICS, "block": "deferred", "optimizer": "adamw", "precision": "fp16", "clipping": 0.3, "tied": False},
    {"nodes": HPZ, "block": "reproducible", "optimizer": "sgd", "precision": "fp32", "clipping": 0.3, "tied": False},
    {"nodes": MICS, "block": "speeds", "optimizer": "sgd", "precision": "fp32", "clipping": 0.3, "tied": True},
]


@pytest.mark.slow
def test_the_result_is_that_of_one_update_per_step_with_shards_of_nodes():
    run_cases((1, 4), [{**case, "grid": (1, 4), "stage": 3} for case in ON_NODES])


def saves_after_a_batch_that_failed(folder):
    """Returns what a save says after a batch that failed ahead of all updates, and behind some."""
    prepare_rank()
    said = []
    for failing in ("F0.0", "B0.0"):
        case = {
            "grid": (1, 1),
            "stage": 1,
            "block": "layered",
            "optimizer": "adamw",
            "precision": "fp32",
            "tied": False,
        }
        engine = engine_of({**case, "clipping": 0.0}, True)
        engine.train_batch(batches(0, engine))
        engine.lgamp.executor.execute = partial(execute_until, failing, engine.lgamp.executor.execute)
        with pytest.raises(ActionError, match=f"failed at {failing}|no luck"):
            engine.train_batch(batches(1, engine))
        try:
            engine.save_checkpoint(folder, tag=failing)
            said.append("")
        except CheckpointError as error:
            said.append(str(error))
    return said


def execute_until(failing, execute, action):
    if str(action) == failing:
        raise ValueError("no luck")
    execute(action)


def test_weights_of_two_steps_are_not_saved(tmp_path):
    ((whole, half),) = run_on_ranks(1, saves_after_a_batch_that_failed, tmp_path)
    assert whole == "" and (tmp_path / "F0.0").exists()
    assert "after some chunks had been updated, so weights of two steps would be saved" in half
    assert not (tmp_path / "B0.0").exists()
