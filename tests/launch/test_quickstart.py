"""The quickstart at a small size: the same script with and without a block, on data prepared from text."""

import json
import os
import re
import subprocess
import sys

import pytest

from benchmarks.quickstart import summarise
from benchmarks.record import ROOT
from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.engine.monitor import TrainingMeasurement

STEPS = 8
FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 16 --pipeline-model-parallel-size 2 --hidden-dropout 0 --attention-dropout 0 --lr 1e-2 "
    "--lr-warmup-iters 2 --eval-interval 4 --eval-iters 1 --group-query-attention --num-query-groups 1 --qk-layernorm "
    "--normalization RMSNorm --swiglu --disable-bias-linear --reset-attention-mask --reset-position-ids "
    "--eod-mask-loss --lr-decay-style cosine --lr-decay-iters 16 --min-lr 1e-3 --save-interval 6"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("quickstart")


@pytest.fixture(scope="module")
def runs(folder):
    """Returns the measurements of both runs."""
    text = folder / "text.txt"
    text.write_text(
        "\n\n".join(f"Section {number}: the quick brown fox jumps over the lazy dog." for number in range(99))
    )
    run("launch/prepare_data.py", str(text), "--output-prefix", str(folder / "data"), "--vocab-size", "300")
    measured = {}
    for name in ("stock", "lgamp"):
        output = folder / f"{name}.json"
        run(
            *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4"),
            *("-m", "ds_lgamp", "run", "--measure", str(output)),
            *(("--trace", str(folder / "trace"), "--trace-steps", "5:7") if name == "lgamp" else ()),
            *("launch/pretrain_gpt.py", *FLAGS),
            *("--train-iters", str(STEPS), "--data-path", str(folder / "data")),
            *("--deepspeed_config", f"example_configs/quickstart_{name}.json"),
            *("--loss-plot", str(folder / f"{name}.png"), "--save", str(folder / name)),
        )
        assert {path.name for path in (folder / name).iterdir()} >= {"global_step6", f"global_step{STEPS}", "latest"}
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        measured[name] = json.loads(output.read_text())
    return measured


def run(*words: str) -> str:
    """Runs Python with ``words``, and returns what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_losses_agree_and_fall(runs):
    summary = summarise(runs)
    assert summary["max_loss_difference"] < 1e-3
    for name in ("stock", "lgamp"):
        losses = summary[name]["losses"]
        assert len(losses) == STEPS and losses[-1] < losses[0] - 0.2


@pytest.mark.slow
def test_the_measurement_counts_what_the_layout_costs(runs):
    stock, lgamp = runs["stock"], runs["lgamp"]
    assert stock["bubble"] == pytest.approx(1 / 4) and lgamp["bubble"] == pytest.approx(1 / 8)
    # Rank 0 gathers and reduces its resident chunks 0 and 2 once, and the tied embedding too. Then follow the sum of
    # its two copies, the gradient norm, and two collectives for the loss (mean over data ranks, broadcast over the
    # pipeline). The agreement that all ranks have data comes first.
    assert lgamp["collectives_per_step"] == 3 + 3 + 1 + 1 + 2 + 1
    # Activations of two chunks and gradients of one, for four micro-batches. The numbers of the documents travel with
    # the activations.
    assert lgamp["messages_per_step"] == (2 + 1) * 4
    assert stock["messages_per_step"] == 2 * 4
    assert 0 < lgamp["peak_bytes"] < stock["peak_bytes"]
    assert lgamp["bytes_per_step"] > 0 and lgamp["step_seconds"] > 0


@pytest.mark.slow
def test_the_comparison_ends_with_a_page_of_both_runs(runs, folder):
    said = run("-m", "benchmarks.quickstart", str(folder)).splitlines()
    assert said[-1] == f"open in a browser: {folder / 'index.html'}"
    page = (folder / "index.html").read_text()
    assert page.count("<polyline") == 2 and "<td>seconds per step</td>" in page
    model = json.loads(re.search(r'type="application/json">(.*?)</script>', page)[1])
    assert [panel["title"][:19] for panel in model["panels"]] == [
        "1F1B, simulated",
        "ds_lgamp, simulated",
        "ds_lgamp, measured,",
    ]
    measured = model["panels"][-1]
    assert len(measured["ranks"]) == 4 and all(rank["start"] for rank in measured["ranks"])


def test_a_run_too_short_to_be_counted_says_so(tmp_path):
    with pytest.raises(ConfigError, match="needs 4 training steps or more, the script made 0; train longer"):
        TrainingMeasurement().write(tmp_path / "numbers.json")
