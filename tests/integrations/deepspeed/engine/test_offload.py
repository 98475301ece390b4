"""With ``offload_optimizer`` and ``offload_param``, on the host or on a disk, a run is the same to the bit as with
everything on the device."""

import tempfile
from itertools import product

import deepspeed
import pytest
import torch

import ds_lgamp
from ds_lgamp.runtime import node
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

HOST = {"device": "cpu"}
DISK = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
"""Files on it have no names, so the folder stays as it is."""
OFFLOADS = {
    "optimizer": {"offload_optimizer": HOST},
    "parameters": {"offload_optimizer": HOST, "offload_param": HOST},
    "half of the optimizer": {"offload_optimizer": HOST | {"ratio": 0.5}},
    "half of the parameters": {"offload_optimizer": HOST | {"ratio": 0.5}, "offload_param": HOST},
    "half of the parameters on nvme": {"offload_optimizer": DISK | {"ratio": 0.5}, "offload_param": DISK},
    "optimizer on nvme": {"offload_optimizer": DISK},
    "parameters, optimizer on nvme": {"offload_optimizer": DISK, "offload_param": HOST},
    "parameters on nvme": {"offload_optimizer": DISK, "offload_param": DISK},
    "only parameters on nvme": {"offload_optimizer": HOST, "offload_param": DISK},
}
BLOCKS = {
    "layered": {},
    "groups": {"micro_batch_group": 3, "resident_chunks": 1},
    "chunks": {"chunks_per_rank": 2},
    "inputs": {"offload_activations": "cpu"},
    "inputs on nvme": {"offload_activations": "nvme", "nvme_path": DISK["nvme_path"]},
    "1f1b": {"schedule": "1f1b"},
    "two parts": {"chunks_per_rank": 2, "split_backward": True},
    "reproducible": {"reproducible": True},
}
FACTORS = {
    "grid": GRIDS,
    "kept": [
        *((stage, kept) for stage in (1, 2, 3) for kept in ("optimizer", "optimizer on nvme")),
        *((3, kept) for kept in OFFLOADS if "parameters" in kept or "half" in kept),
    ],
    "block": list(BLOCKS),
    "optimizer": list(OPTIMIZERS),
    "precision": list(PRECISIONS),
    "clipping": [0.0, 0.3],
    "tied": [False, True],
    "frozen": [False, True],
}


def engine_of(case, offload, **block):
    """Builds an engine. ``offload`` adds keys to zero_optimization, ``block`` to that of the case."""
    stage, _ = case["kept"]
    training = Training(blocks=5, tied=case["tied"], tuples=False)
    ds_lgamp.install()
    with quiet():
        module = pipeline_module(training, case["grid"][0])
        scaled_weights(module.named_parameters())
        if case["frozen"]:
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(not name.startswith(("3.", "4.")) or name.endswith("bias"))
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = OPTIMIZERS[case["optimizer"]](decay_groups(trained, 0.01))
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": case["clipping"],
            "zero_optimization": {"stage": stage, **offload},
            **PRECISIONS[case["precision"]],
            "ds_lgamp": BLOCKS[case["block"]] | block,
        }
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def train(case, offload, **block):
    """Trains, and evaluates in between and at the end."""
    engine = engine_of(case, offload, **block)
    numbers = []
    for step in range(STEPS):
        numbers.append(numbers_of_step(engine, step))
        if step % 2:
            numbers.append([engine.eval_batch(batches(99, engine, training=False)).item()])
    return run_of(engine, numbers)


def check(case):
    assert_equal_runs(case, train(case, OFFLOADS[case["kept"][1]]), train(case, {}))


def run_cases(grid, cases):
    """Checks ten cases per start of ranks, because every engine leaves the threads of its groups behind."""
    ranks, cases = grid[0] * grid[1], [{**case, "grid": grid} for case in cases]
    for some in (cases[start : start + 10] for start in range(0, len(cases), 10)):
        assert run_on_ranks(ranks, check_all, check, some) == [len(some)] * ranks


TYPICAL = [
    {"kept": (3, "parameters"), "block": "inputs", "optimizer": "sgd", "precision": "fp32", "clipping": 0.0},
    {"kept": (3, "optimizer"), "block": "groups", "optimizer": "fused", "precision": "fp32", "clipping": 0.3},
    {"kept": (1, "optimizer"), "block": "chunks", "optimizer": "adamw", "precision": "fp32", "clipping": 0.3},
    {"kept": (2, "optimizer"), "block": "layered", "optimizer": "fused", "precision": "bf16", "clipping": 0.0},
    {"kept": (3, "parameters"), "block": "groups", "optimizer": "fused", "precision": "fp16", "clipping": 0.3},
    {"kept": (3, "half of the parameters"), "block": "groups", "optimizer": "adamw", "precision": "bf16"}
    | {"clipping": 0.0},
    {"kept": (3, "half of the parameters on nvme"), "block": "layered", "optimizer": "adam", "precision": "fp32"}
    | {"clipping": 0.3},
    {"kept": (3, "parameters on nvme"), "block": "inputs on nvme", "optimizer": "fused", "precision": "bf16"}
    | {"clipping": 0.3},
    {"kept": (3, "parameters on nvme"), "block": "groups", "optimizer": "fused", "precision": "without copies"}
    | {"clipping": 0.3},
]
UPDATED_BEFORE_RELEASE = {**TYPICAL[0], "block": "two parts", "optimizer": "adamw"}
"""With one data-parallel rank, a chunk's update may come while second parts of others keep it from its release."""


def threads_of_updates():
    """The number of threads with which torch computes in the thread of the host, on a machine of eight cores."""
    prepare_rank()
    node.usable_cores = lambda _: 8
    engine, seen = engine_of({**TYPICAL[1], "grid": (1, 2), "tied": False, "frozen": False}, OFFLOADS["optimizer"]), []
    engine.optimizer.partition.host.updates.start(lambda: seen.append(torch.get_num_threads())).wait()
    return seen[0]


def test_each_rank_updates_on_its_share_of_the_cores():
    """Launchers start ranks with one thread each."""
    assert run_on_ranks(2, threads_of_updates) == [3, 3]


@pytest.mark.parametrize(
    ("grid", "cases"),
    [((1, 1), [*TYPICAL[:2], *TYPICAL[5:7]]), ((1, 2), TYPICAL[1:]), ((2, 1), [UPDATED_BEFORE_RELEASE])],
    ids=["1 rank", "2 ranks", "2 pipeline ranks"],
)
def test_the_result_is_that_of_a_run_on_the_device(grid, cases):
    run_cases(grid, [{**case, "tied": True, "frozen": True} for case in cases])


def every_pair(grid):
    cases = [*filter(trains, (dict(zip(FACTORS, values)) for values in product(*FACTORS.values())))]
    # Tied modules are refused in reproducible runs.
    trainable = [case for case in cases if not (case["tied"] and case["block"] == "reproducible")]
    # 1F1B has one chunk on each rank, and half of it cannot stay.
    divisible = [case for case in trainable if not ("half" in case["kept"][1] and case["block"] == "1f1b")]
    return pairwise([case for case in divisible if case["grid"] == grid])


@pytest.mark.full
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_result_of_every_pair_of_factors_is_that_of_a_run_on_the_device(grid):
    run_cases(grid, every_pair(grid))
