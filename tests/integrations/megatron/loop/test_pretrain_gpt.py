"""Megatron-LM's unedited pretrain_gpt.py on the CPU. Runs with and without a block, on one process and on parallel
ranks, train alike. So does a resumed run."""

import os
import re
import subprocess
import sys
from functools import cache

import pytest

from ds_lgamp.view.recording import read_recording
from testing import ROOT
from testing.pretraining import (
    EVALUATED_EVERY,
    ITERATIONS,
    MODEL,
    PLACES,
    STOCK_CHUNKS,
    after_the_checkpoint,
    assert_close,
    block_flag,
    go_back,
    has_flag,
    megatron_tree,
    pretrain,
    pretrain_with_block,
    start_in,
)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return start_in(tmp_path_factory.mktemp("start"))


def save_to(folder):
    megatron_tree()
    return f"--save {folder} --save-interval {EVALUATED_EVERY}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def alone(start, saved):
    """Trains one process without a block."""
    losses = pretrain(1, f"{start} {save_to(saved)}")
    go_back(saved)
    return losses


@pytest.fixture(scope="module")
def saved_with_block(tmp_path_factory):
    """Returns the folders in which the runs of ``with_block`` save."""
    folder = tmp_path_factory.mktemp("with_block")
    return {place: folder / str(number) for number, place in enumerate(PLACES)}


@pytest.fixture(scope="module")
def with_block(start, saved_with_block):
    """Returns a function that trains at a place with a block, once per place."""

    @cache
    def train(place):
        folder = saved_with_block[place]
        folder.mkdir()
        losses = pretrain_with_block(place, f"{start} {save_to(folder)}", folder)
        go_back(folder)
        return losses

    return train


def test_the_loss_falls(alone):
    assert list(alone.training) == list(range(1, ITERATIONS + 1))
    assert list(alone.validation) == list(range(EVALUATED_EVERY, ITERATIONS + 1, EVALUATED_EVERY))
    assert alone.training[ITERATIONS] < alone.training[1] - 0.1
    assert alone.validation[ITERATIONS] < alone.validation[EVALUATED_EVERY]


@pytest.mark.parametrize("place", PLACES)
def test_without_a_block_ranks_train_like_one_process(place, start, alone):
    ranks, flags = PLACES[place]
    if ranks > 1:
        assert_close(pretrain(ranks, f"{start} {flags}"), alone, 1e-5)


@pytest.mark.parametrize("place", PLACES)
def test_with_a_block_ranks_train_like_one_process(place, with_block, alone):
    assert_close(with_block(place), alone, 1e-5 if place.startswith("T2") else 1e-6)


@pytest.mark.parametrize("schedule", ["layered", "interleaved_1f1b"])
def test_losses_are_to_the_digit_those_of_megatrons_own_interleaved_schedule(schedule, start, with_block, tmp_path):
    ranks, flags = PLACES["P2 x N4"]
    ours = with_block("P2 x N4")
    if schedule != "layered":
        ours = pretrain_with_block("P2 x N4", start, tmp_path, schedule=schedule)
    assert ours == pretrain(ranks, f"{start} {flags} {STOCK_CHUNKS}")


@pytest.mark.parametrize("place", ["P1 x N4", "T2 x P2"])
def test_within_a_budget_losses_are_to_the_digit_those_of_full_recomputation(place, start, tmp_path):
    full = pretrain_with_block(place, start, tmp_path, recompute="full")
    assert pretrain_with_block(place, start, tmp_path, recompute="auto", recompute_memory="1 GB") == full


def test_a_resumed_run_goes_on_to_the_bit(alone, saved):
    assert pretrain(1, f"--load {saved}") == after_the_checkpoint(alone)


def test_a_run_with_a_block_resumes_one_without(alone, saved, tmp_path):
    assert_close(pretrain_with_block("P2 x N4", f"--load {saved}", tmp_path), after_the_checkpoint(alone))


def test_a_run_without_a_block_resumes_one_with(alone, with_block, saved_with_block):
    with_block("P1 x N4")
    assert_close(pretrain(1, f"--load {saved_with_block['P1 x N4']}"), after_the_checkpoint(alone))


def test_a_run_with_a_block_resumes_to_the_bit(with_block, saved_with_block, tmp_path):
    trained = with_block("P1 x N4")
    resumed = pretrain_with_block("P1 x N4", f"--load {saved_with_block['P1 x N4']}", tmp_path)
    assert resumed == after_the_checkpoint(trained)


def test_iterations_may_be_skipped(start, tmp_path):
    flags = f"{start} --iterations-to-skip 2 5"
    assert_close(pretrain_with_block("P1 x N4", flags, tmp_path), pretrain(1, flags))


def skip_without(flag):
    if not has_flag(flag):
        pytest.skip(f"the tree's release has no {flag}")


@pytest.mark.parametrize("place", ["P1 x N4", "P2 x W2"])
def test_evaluations_may_have_batches_of_other_sizes(place, start, tmp_path):
    skip_without("--eval-micro-batch-size")
    flags = f"{start} --eval-micro-batch-size 1 --eval-global-batch-size 6"
    assert_close(pretrain_with_block(place, flags, tmp_path), pretrain(1, flags))


@pytest.mark.parametrize(("place", "data_ranks"), [("P2 x N4", 1), ("P2 x W2", 2)])
def test_batches_may_grow_by_steps(place, data_ranks, start, tmp_path):
    """The learning rate depends on the number of data-parallel ranks then."""
    skip_without("--step-batch-size-schedule")
    ranks, own = PLACES[place]
    flags, model = f"{start} --step-batch-size-schedule 0:8,1K:16", MODEL.partition("--global-batch-size")[0]
    block = block_flag(own, tmp_path, schedule="interleaved_1f1b")
    ours = pretrain(ranks, f"{flags} {own} {block}", "-m ds_lgamp run", model=model)
    assert_close(ours, pretrain(data_ranks, flags, model=model))


def test_a_trace_has_the_numbers_of_the_log(start, tmp_path):
    """``start`` sets the iteration to 0, and a resumed run goes on with the numbers of the first one."""
    ranks, flags = PLACES["P2 x N4"]
    words = f"{flags} {block_flag(flags, tmp_path)} --save {tmp_path} --save-interval 2"
    for first, load in ((2, start), (4, f"--load {tmp_path}")):
        launcher = f"-m ds_lgamp run --trace {tmp_path / 'trace'} --trace-steps {first}:{first}"
        pretrain(ranks, f"{words} {load} --exit-interval {first}", launcher)
        recording = read_recording(tmp_path / "trace")
        assert [[step.step for step in rank.steps] for rank in recording.ranks] == [[first]] * ranks


def test_training_may_be_skipped(start, tmp_path):
    """Megatron-LM then evaluates, and counts no iteration."""
    flags = f"{start} --skip-train --eval-iters 2"
    block = block_flag("", tmp_path)
    assert pretrain(1, f"{flags} {block}", "-m ds_lgamp run").training == {}


def test_a_file_of_other_chunks_is_refused(start, tmp_path):
    """Otherwise Megatron-LM would renumber the layers of a chunk and load layers with the same number."""
    files = f"--ckpt-format torch --load {tmp_path / 'saved'}"
    short = f"--save {tmp_path / 'saved'} --save-interval 1 --exit-interval 1"
    pretrain_with_block("P1 x N4", f"{files} {short}", tmp_path)
    with pytest.raises(
        AssertionError, match=r"chunks of \[2, 2, 2, 2\] layers .*, but this run has chunks of \[4, 4\]"
    ):
        pretrain_with_block("P1 x N4", files, tmp_path, chunks_per_rank=2)


def test_the_command_of_the_page_trains(tmp_path):
    """Runs the command as a user types it, except for the path of the tree and the backend."""
    page = (ROOT / "docs" / "megatron.md").read_text()
    (command,) = re.findall(r"```bash\n(cat > ds_config.json.*?)```", page, re.DOTALL)
    command = command.replace("Megatron-LM/pretrain_gpt.py", str(megatron_tree() / "pretrain_gpt.py"))
    command = command.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
    command = command.replace("-m ds_lgamp", "-m testing.cpu_shim -m ds_lgamp").rstrip() + " --distributed-backend gloo"
    environment = {
        **os.environ,
        **{"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"},
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["bash", "-ec", command],
        **{"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 240},
    )
    assert done.returncode == 0, done.stderr
    assert "iteration       20/      20" in done.stdout
