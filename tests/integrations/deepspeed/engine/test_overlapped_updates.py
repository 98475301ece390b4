"""With ``overlap_update``, a run is the same to the bit as with one update of all chunks per step."""

from functools import cache, partial
from itertools import product
from typing import NamedTuple

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator

import ds_lgamp
from ds_lgamp.checkpoint.errors import CheckpointError
from ds_lgamp.runtime.executor import ActionError
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.models import (
    MICRO_BATCHES,
    Training,
    decay_groups,
    pipeline_module,
    scaled_weights,
)
from tests.integrations.deepspeed.running import batches, gathered
from tests.pairwise import pairwise

STEPS = 4
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.01, eps=1e-4, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-4, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=0.01, eps=1e-4, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "nadam": partial(torch.optim.NAdam, lr=0.01, eps=1e-4),
}
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
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "checked": {"bf16": {"enabled": True, "check_grad_overflow": True}},
    # The first steps overflow: 2^40 exceeds fp16.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 40, "loss_scale_window": 2, "hysteresis": 1}},
    "static": {"fp16": {"enabled": True, "loss_scale": 1024}},
}
GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2)]
FACTORS = {
    "grid": GRIDS,
    "stage": [0, 1, 2, 3],
    "block": list(BLOCKS),
    "optimizer": list(OPTIMIZERS),
    "precision": list(PRECISIONS),
    "clipping": [0.0, 0.3],
    "tied": [False, True],
}


class Run(NamedTuple):
    """What a training shows of itself."""

    numbers: list[list[float]]
    """Loss, norm, learning rate and loss scale of every step."""
    weights: dict[str, torch.Tensor]
    """The master weights after the last step."""
    states: list[dict]
    """The optimizer's states of the shards."""


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


def observed(engine, steps):
    """Trains ``steps``, and changes the decay of the next step after each, as a script may."""
    numbers = []
    for step in steps:
        loss = engine.train_batch(batches(step, engine)).item()
        numbers.append([loss, float(engine.get_global_grad_norm()), *engine.get_lr(), engine.optimizer.loss_scale])
        engine.optimizer.param_groups[1]["weight_decay"] = 0.01 * step
    return numbers


def finished(engine, numbers):
    engine.eval_batch(batches(99, engine, training=False))
    weights = gathered(engine.optimizer.partition, lambda unit: unit.master.values)
    shards = [shard for group in engine.optimizer.param_groups for shard in group["params"]]
    return Run(numbers, weights, [dict(engine.optimizer.state[shard]) for shard in shards])


def train(case, overlap_update):
    engine = engine_of(case, overlap_update)
    return finished(engine, observed(engine, range(STEPS)))


def equal(one, other):
    """Whether two values, such as states of an optimizer, are the same to the bit. Norms may be NaN."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other or (one != one and other != other)


def check(case):
    plain, overlapped = (train(case, overlap) for overlap in (False, True))
    for step, (own, expected) in enumerate(zip(overlapped.numbers, plain.numbers, strict=True)):
        assert all(map(equal, own, expected)), (case, step, own, expected)
    assert plain.weights.keys() == overlapped.weights.keys()
    for name, expected in plain.weights.items():
        assert torch.equal(overlapped.weights[name], expected), (case, name)
    for own, expected in zip(overlapped.states, plain.states, strict=True):
        assert all(equal(own[key], expected[key]) for key in expected), case


def check_all(cases):
    prepare_rank()
    # DeepSpeed says that a CPU has no fp16, but torch computes in it.
    get_accelerator().is_fp16_supported = lambda: True
    for case in cases:
        check(case)
    return len(cases)


@cache
def chosen_cases():
    return pairwise([dict(zip(FACTORS, values)) for values in product(*FACTORS.values())])


def run_cases(grid, cases):
    ranks = grid[0] * grid[1]
    assert run_on_ranks(ranks, check_all, cases) == [len(cases)] * ranks


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
        engine.executor.execute = partial(execute_until, failing, engine.executor.execute)
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
