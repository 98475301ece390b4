"""launch/pretrain_gpt.py decays, pads its vocabulary and evaluates as Megatron-LM does."""

import importlib
import json
import re
import sys

import pytest
import torch

from testing import ROOT
from testing.launching import run, torchrun

SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32"
TRAINING = (
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-2 --lr-warmup-iters 2 --adam-eps 1e-4 "
    "--hidden-dropout 0 --attention-dropout 0"
)
TRAINED = re.compile(r"iteration +(\d+) \| training loss ([\d.]+)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with a text of 301 words, a number that two ranks cannot share, and a file with a block."""
    folder = tmp_path_factory.mktemp("gpt")
    text = folder / "text.txt"
    text.write_text("\n\n".join(f"Section {number}: the quick brown fox jumps over a dog." for number in range(99)))
    words = ["launch/prepare_data.py", str(text), "--output-prefix", str(folder / "data"), "--vocab-size", "301"]
    assert "vocabulary of 301" in run([sys.executable, *words], 200)
    (folder / "ds_config.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "ds_lgamp": {}}))
    return folder


def pretrain(folder, ranks, flags):
    """Runs the script. Returns its output."""
    files = f"--data-path {folder}/data --deepspeed_config {folder}/ds_config.json"
    return torchrun(ranks, f"-m ds_lgamp run launch/pretrain_gpt.py {SIZES} {TRAINING} {files} {flags}".split())


def losses(printed):
    return {int(iteration): float(loss) for iteration, loss in TRAINED.findall(printed)}


@pytest.fixture(scope="module")
def tensor_parallel(folder):
    """Returns what two tensor-parallel ranks print, whose every second iteration is evaluated."""
    return pretrain(folder, 2, "--tensor-model-parallel-size 2 --eval-interval 2")


@pytest.mark.slow
def test_an_interval_of_zero_prints_no_training_losses(folder):
    printed = pretrain(folder, 1, "--log-interval 0 --eval-interval 3")
    assert losses(printed) == {} and "iteration     3 | validation loss" in printed


@pytest.mark.slow
def test_tensor_parallel_ranks_share_a_padded_vocabulary_and_train_as_one_rank_with_as_many_words(
    folder, tensor_parallel
):
    alone = pretrain(folder, 1, "--make-vocab-size-divisible-by 256 --eval-interval 0")
    assert losses(tensor_parallel) == pytest.approx(losses(alone), rel=1e-5)
    assert list(losses(alone)) == [1, 2, 3]
    assert "iteration     2 | validation loss" in tensor_parallel
    assert "validation" not in alone, "an interval of 0 leaves evaluation out"


def test_biases_and_norms_do_not_decay(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "launch")
    script = importlib.import_module("pretrain_gpt")
    layers = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    optimizer = torch.optim.AdamW(script.parameter_groups(layers), lr=1.0, weight_decay=0.5)
    for parameter in layers.parameters():
        torch.nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    left = {name: parameter.flatten()[0].item() for name, parameter in layers.named_parameters()}
    assert left == {"0.weight": 0.5, "1.weight": 0.5, "1.bias": 1, "2.weight": 1, "2.bias": 1}
