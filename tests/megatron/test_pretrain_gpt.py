"""Megatron-LM's pretrain_gpt.py on the CPU: one process and parallel ranks train alike, and so does a resumed run."""

import pytest

from tests.megatron.pretraining import (
    EVALUATED_EVERY,
    ITERATIONS,
    LAYERS,
    MICRO_BATCHES,
    Losses,
    megatron_tree,
    pretrain,
)

INTERLEAVED = (
    f"--num-virtual-stages-per-pipeline-rank {LAYERS // 2} "
    f"--microbatch-group-size-per-virtual-pipeline-stage {MICRO_BATCHES}"
)
DISTRIBUTED_OPTIMIZER = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
PLACES = {
    "pipeline": (2, "--pipeline-model-parallel-size 2"),
    "interleaved": (2, f"--pipeline-model-parallel-size 2 {INTERLEAVED}"),
    "pipeline and data": (4, f"--pipeline-model-parallel-size 2 {DISTRIBUTED_OPTIMIZER}"),
    "tensor and pipeline": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Flags with which every run starts from the same weights; drawn anew, they would differ by pipeline rank."""
    megatron_tree()
    folder = tmp_path_factory.mktemp("start")
    pretrain(1, f"--save {folder} --save-interval 1 --exit-interval 1")
    return f"--load {folder} --finetune"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    megatron_tree()
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def alone(start, saved):
    """What one process trains; its checkpoint of the evaluated iteration is the latest in ``saved``."""
    losses = pretrain(1, f"{start} --save {saved} --save-interval {EVALUATED_EVERY}")
    (saved / "latest_checkpointed_iteration.txt").write_text(str(EVALUATED_EVERY))
    return losses


def assert_close(losses, reference):
    assert losses.training == pytest.approx(reference.training, rel=1e-6)
    assert losses.validation == pytest.approx(reference.validation, rel=1e-6)


def after_the_checkpoint(losses):
    return Losses(*({at: loss for at, loss in kind.items() if at > EVALUATED_EVERY} for kind in losses))


def test_the_loss_falls(alone):
    assert list(alone.training) == list(range(1, ITERATIONS + 1))
    assert list(alone.validation) == list(range(EVALUATED_EVERY, ITERATIONS + 1, EVALUATED_EVERY))
    assert alone.training[ITERATIONS] < alone.training[1] - 0.1
    assert alone.validation[ITERATIONS] < alone.validation[EVALUATED_EVERY]


@pytest.mark.parametrize("place", PLACES)
def test_parallel_ranks_train_like_one_process(place, start, alone):
    ranks, flags = PLACES[place]
    assert_close(pretrain(ranks, f"{start} {flags}"), alone)


def test_a_resumed_run_goes_on_to_the_bit(alone, saved):
    assert pretrain(1, f"--load {saved}") == after_the_checkpoint(alone)


def test_more_ranks_resume_a_run(alone, saved):
    ranks, flags = PLACES["pipeline"]
    assert_close(pretrain(ranks, f"--load {saved} {flags}"), after_the_checkpoint(alone))
