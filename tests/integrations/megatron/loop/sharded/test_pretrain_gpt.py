"""Megatron-LM's unedited pretrain_gpt.py at ZeRO stages 2 and 3, on the CPU. It trains like one process without a
block, and checkpoints go from each kind of run to each other."""

import json
from functools import partial

import pytest

from testing.launching import torchrun
from testing.pretraining import (
    DISTRIBUTED_OPTIMIZER,
    EVALUATED_EVERY,
    PIPELINE,
    after_the_checkpoint,
    assert_close,
    block_flag,
    go_back,
    megatron_tree,
    pretrain,
    start_in,
    words_of,
)

RECOMPUTATION = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TENSORS = "--tensor-model-parallel-size 2"
RUNS = {
    "P1 x N4": (1, 3, ""),
    "P2 x N4": (2, 3, PIPELINE),
    "P2 x N4 with recomputation": (2, 3, f"{PIPELINE} {RECOMPUTATION}"),
    "P2 x W2": (4, 3, PIPELINE),
    "P2 x W2 at stage 2": (4, 2, f"{PIPELINE} {DISTRIBUTED_OPTIMIZER}"),
    "T2 x P2": (4, 3, f"{PIPELINE} {TENSORS}"),
    "T2 x P2 x W2": (8, 3, f"{PIPELINE} {TENSORS}"),
}
"""Ranks, stage and flags."""
LLAMA = """
    --swiglu --group-query-attention --num-query-groups 2 --normalization RMSNorm --position-embedding-type rope
    --no-rope-fusion --disable-bias-linear --untie-embeddings-and-output-weights
"""

SEVERAL_TOKENS = """
    --mtp-num-layers 1 --position-embedding-type rope --no-rope-fusion --untie-embeddings-and-output-weights
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    megatron_tree()
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def start(folder):
    return start_in(folder / "start")


@pytest.fixture(scope="module")
def alone(start, folder):
    """Trains one process without a block."""
    return saved(folder / "alone", lambda save: pretrain(1, f"{start} {save}"))


@pytest.fixture(scope="module")
def sharded(start, folder):
    """Trains at stage 3."""
    return saved(folder / "sharded", lambda save: pretrain_sharded("P2 x W2", f"{start} {save}", folder))


def saved(folder, train):
    """Trains, and makes the checkpoint of the evaluated iteration the latest."""
    losses = train(f"--save {folder} --save-interval {EVALUATED_EVERY}")
    go_back(folder)
    return losses


def pretrain_sharded(name, flags, folder):
    ranks, stage, own_flags = RUNS[name]
    file = block_flag(own_flags, folder, stage)
    return pretrain(ranks, f"{flags} {own_flags} {file}", "-m ds_lgamp run", seconds=900)


@pytest.mark.parametrize("name", [name for name in RUNS if name != "P2 x W2"])
def test_sharded_chunks_train_like_one_process(name, start, alone, tmp_path):
    assert_close(pretrain_sharded(name, start, tmp_path), alone, 1e-5 if name.startswith("T2") else 1e-6)


def test_saving_changes_nothing(alone, sharded):
    assert_close(sharded, alone)


def test_a_sharded_run_resumes_one_without_a_block(alone, folder, tmp_path):
    assert_close(pretrain_sharded("P2 x N4", f"--load {folder / 'alone'}", tmp_path), after_the_checkpoint(alone))


def test_a_run_without_a_block_resumes_a_sharded_one(alone, sharded, folder):
    assert_close(pretrain(1, f"--load {folder / 'sharded'}"), after_the_checkpoint(alone))


def test_a_sharded_run_resumes_to_the_bit(sharded, folder, tmp_path):
    resumed = pretrain_sharded("P2 x W2", f"--load {folder / 'sharded'}", tmp_path)
    assert resumed == after_the_checkpoint(sharded)


def test_a_sharded_run_resumes_one_of_another_layout(alone, sharded, folder, tmp_path):
    resumed = pretrain_sharded("T2 x P2", f"--load {folder / 'sharded'}", tmp_path)
    assert_close(resumed, after_the_checkpoint(alone), 1e-5)


def test_the_parts_of_llama_train_and_continue(tmp_path):
    """Gated layers are saved as two tensors. Without a tied embedding, a chunk is one unit."""
    drawn, trained = tmp_path / "drawn", tmp_path / "trained"
    pretrain(1, f"{LLAMA} --save {drawn} --save-interval 1 --exit-interval 1")
    begin = f"{LLAMA} --load {drawn} --finetune"
    alone = pretrain(1, begin)
    assert_close(saved(trained, lambda save: pretrain_sharded("T2 x P2", f"{begin} {save}", tmp_path)), alone, 1e-5)
    assert_close(pretrain(1, f"{LLAMA} --load {trained}"), after_the_checkpoint(alone), 1e-5)
    assert_close(pretrain_sharded("P2 x W2", f"{LLAMA} --load {trained}", tmp_path), after_the_checkpoint(alone), 1e-5)


def test_layers_that_predict_several_tokens_train_and_continue(tmp_path):
    several = f"{SEVERAL_TOKENS} --load {tmp_path / 'drawn'} --finetune"
    pretrain(1, f"{SEVERAL_TOKENS} --save {tmp_path / 'drawn'} --save-interval 1 --exit-interval 1")
    alone, layout = pretrain(1, several), "--pipeline-model-parallel-layout"
    flags = f"{PIPELINE} {layout} Ett|tt|tt|ttmL {without_chunks(tmp_path)}"
    train = partial(pretrain, 2, launcher="-m ds_lgamp run", seconds=900)
    assert_close(saved(tmp_path / "trained", lambda save: train(f"{several} {flags} {save}")), alone)
    again = f"{SEVERAL_TOKENS} --load {tmp_path / 'trained'}"
    assert_close(pretrain(1, again), after_the_checkpoint(alone))
    assert_close(train(f"{again} {flags.replace('Ett|tt|tt|ttmL', 'Ettt|tttttmL')}"), after_the_checkpoint(alone))


def without_chunks(folder):
    """Returns the option that names a file for stage 3 whose block leaves the chunks to the flags."""
    path = folder / "ds_config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, "ds_lgamp": {}}))
    return f"--ds-lgamp-config {path}"


def test_what_stages_2_and_3_have_not_is_refused_before_anything_is_built(tmp_path):
    command = words_of(block_flag("", tmp_path, 3), str(tmp_path), "-m ds_lgamp run")
    command.remove("--no-gradient-accumulation-fusion")
    words = "ds_lgamp: .*--gradient-accumulation-fusion is True .*; give --no-gradient-accumulation-fusion"
    with pytest.raises(AssertionError, match=words):
        torchrun(1, command)


def test_fully_reshardable_state_of_the_distributed_optimizer_is_taken_over(start, alone, tmp_path):
    save = f"--save {tmp_path} --save-interval {EVALUATED_EVERY} --exit-interval {EVALUATED_EVERY}"
    pretrain(2, f"{start} {DISTRIBUTED_OPTIMIZER} {save} --dist-ckpt-optim-fully-reshardable")
    assert_close(pretrain_sharded("P2 x N4", f"--load {tmp_path}", tmp_path), after_the_checkpoint(alone))
