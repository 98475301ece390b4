"""DeepSpeed's ``zero_to_fp32`` reads checkpoints of this package, by its functions and by its script beside them."""

import subprocess
import sys
from contextlib import ExitStack

import pytest
import safetensors.torch
import torch
from deepspeed.utils import zero_to_fp32

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.folder import write_latest
from ds_lgamp.integrations.deepspeed.checkpoint.fp32_weights import SCRIPT, put_script, serve_zero_to_fp32
from testing.checkpoints import example, flip_in, written


@pytest.fixture
def run(tmp_path):
    """Returns a directory with the example as its latest checkpoint, and the script."""
    written(tmp_path / "run" / "global_step3")
    write_latest(tmp_path / "run", "global_step3")
    (tmp_path / "run" / SCRIPT).write_text("raise SystemExit('this is the script of DeepSpeed')")
    put_script(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def served():
    with ExitStack() as undo:
        serve_zero_to_fp32(undo)
        yield


def expected(trained_only=False):
    whole = example()
    described = whole.state["parameters"]
    parameters = {
        name: tensor.float()
        for name, tensor in whole.parameters.items()
        if not trained_only or described[name]["group"] is not None
    }
    return parameters | {
        name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in whole.buffers.items()
    }


def same(tensors, wanted):
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("lazy", [False, True])
def test_the_function_returns_parameters_and_buffers_in_fp32(run, served, lazy):
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(run), lazy_mode=lazy)
    same({name: tensor.contiguous() for name, tensor in state.items()}, expected())


def test_frozen_parameters_may_be_left_out(run, served):
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
        str(run), tag="global_step3", exclude_frozen_parameters=True
    )
    same(state, expected(trained_only=True))
    assert len(state) < len(expected())


def test_a_damaged_checkpoint_is_refused_in_a_sentence_of_ours(run, served):
    flip_in(run / "global_step3", "parameters/10.weight")
    with pytest.raises(CheckpointError, match="damaged"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(run))


def test_another_folder_is_left_to_deepspeed(tmp_path, served):
    (tmp_path / "global_step1").mkdir()
    with pytest.raises(FileNotFoundError, match="can't find"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "global_step1")


@pytest.mark.parametrize(
    ("words", "file", "read"),
    [
        ((), "pytorch_model.bin", torch.load),
        pytest.param(
            ("--safe_serialization", "-t", "global_step3"),
            "model.safetensors",
            safetensors.torch.load_file,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_script_writes_what_deepspeeds_script_does(run, tmp_path, words, file, read):
    subprocess.run([sys.executable, str(run / SCRIPT), str(run), str(tmp_path / "weights"), *words], check=True)
    same(read(tmp_path / "weights" / file), expected())
