"""Megatron-LM's unedited pretrain_gpt.py trains mixtures of experts at stages 1 to 3 like one process without a block,
and checkpoints go on however ranks divide them."""

import pytest

from testing.pretraining import (
    DISTRIBUTED_OPTIMIZER,
    EVALUATED_EVERY,
    PIPELINE,
    TRAINING,
    block_flag,
    go_back,
    megatron_tree,
    trained,
)

EXPERTS = """
    --disable-bias-linear --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
    --moe-z-loss-coeff 0.001
"""
SGD = f"{TRAINING} --optimizer sgd --sgd-momentum 0.5"
"""Steps of Adam would let rounding errors send tokens to other experts."""
EP2, ALL_GATHER = "--expert-model-parallel-size 2", "--moe-token-dispatcher-type allgather"
ALL_TO_ALL = "--moe-token-dispatcher-type alltoall"
RECOMPUTATION = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
RUNS = {
    "EP2": (2, 3, 4, f"{EP2} {ALL_TO_ALL}"),
    "EP2 by all-gathers at stage 2": (2, 2, 4, f"{EP2} {ALL_GATHER}"),
    "P2 x EP2": (4, 3, 8, f"{PIPELINE} {EP2} {ALL_TO_ALL}"),
    "P2 x EP2 at stage 2 with recomputation": (4, 2, 8, f"{PIPELINE} {EP2} {ALL_TO_ALL} {RECOMPUTATION}"),
    "P2 x EP2 by all-gathers": (4, 3, 4, f"{PIPELINE} {EP2} {ALL_GATHER}"),
    "P2 x EP2 at stage 0": (4, 0, 4, f"{PIPELINE} {EP2} {ALL_TO_ALL}"),
    "P2 x W2, every rank with all experts": (4, 3, 4, f"{PIPELINE} {ALL_TO_ALL}"),
}
"""Ranks, stage, experts and flags."""
TOLERANCES = {"lm loss": 1e-6, "lm loss validation": 1e-6, "load_balancing_loss": 1e-6, "grad-norm": 2e-5}
"""By tag. The norm of one process is rounded: PyTorch adds up the squares of large tensors in fp32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    megatron_tree()
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def starts(folder):
    """Starts of models with 4 and 8 experts."""
    return {count: start_in(folder / f"{count}", count) for count in (4, 8)}


def start_in(folder, count):
    training(1, f"{experts(count)} {ALL_TO_ALL} --save {folder} --save-interval 1 --exit-interval 1")
    return f"{experts(count)} --load {folder} --finetune"


def experts(count):
    return f"{EXPERTS} --num-experts {count}"


def training(ranks, flags, launcher=""):
    return trained(ranks, flags, launcher, training=SGD, seconds=900)


@pytest.fixture(scope="module")
def alone(starts, folder):
    """Trains one process without a block, with 4 and with 8 experts."""
    return {count: training(1, f"{start} {ALL_TO_ALL} {saving(folder, count)}") for count, start in starts.items()}


def saving(folder, count):
    return f"--save {folder / f'alone-{count}'} --save-interval {EVALUATED_EVERY}"


def run(name, flags, folder):
    ranks, stage, _, own = RUNS[name]
    return training(ranks, f"{flags} {own} {block_flag(own, folder, stage)}", "-m ds_lgamp run")


def assert_alike(found, expected, after=0):
    for tag, tolerance in TOLERANCES.items():
        later = {step: value for step, value in expected[tag].items() if step > after}
        if not later:
            continue  # What is evaluated last is not written.
        assert found[tag] == pytest.approx(later, rel=tolerance), tag


@pytest.mark.parametrize("name", RUNS)
def test_experts_train_as_in_one_process(name, starts, alone, tmp_path):
    count = RUNS[name][2]
    assert_alike(run(name, starts[count], tmp_path), alone[count])


def test_the_distributed_optimizer_trains_them_at_stage_1(starts, tmp_path):
    """It has Adam alone, whose steps are made small."""
    adam = f"{TRAINING} --lr 4e-4 --min-lr 4e-5 --adam-eps 1e-2"
    flags = f"{PIPELINE} {EP2} {ALL_TO_ALL} {DISTRIBUTED_OPTIMIZER}"
    one = trained(1, f"{starts[4]} {ALL_TO_ALL}", training=adam, seconds=900)
    ours = trained(4, f"{starts[4]} {flags} {block_flag(flags, tmp_path)}", "-m ds_lgamp run", adam, 900)
    assert_alike(ours, one)


def test_checkpoints_go_on_however_ranks_divide_experts(starts, alone, folder, tmp_path):
    """At the same numbers of tensor and pipeline ranks, release 0.16 asks for random states of the same EP."""
    saved, middle = folder / "alone-4", EVALUATED_EVERY + 5
    go_back(saved)
    flags = f"{experts(4)} --no-load-rng --load"
    ours = run("EP2", f"{flags} {saved} --save {tmp_path} --save-interval {middle}", tmp_path)
    assert_alike(ours, alone[4], EVALUATED_EVERY)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(middle))
    for name in ("P2 x EP2 by all-gathers", "P2 x W2, every rank with all experts"):
        assert_alike(run(name, f"{flags} {tmp_path}", tmp_path), alone[4], middle)
