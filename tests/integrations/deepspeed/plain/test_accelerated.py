"""transformers' Trainer and Accelerate's loop train through the engine, unedited."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from testing.launching import torchrun
from testing.ranks import run_on_ranks
from testing.scripts.trains_with_trainer import tiny
from tests.integrations.deepspeed.plain.accelerated import train_own_model_with_accelerate, train_with_accelerate
from tests.integrations.deepspeed.plain.training import train_alone
from tests.integrations.split import own_models
from tests.integrations.transformers.models import BALANCED, make
from tests.slow import slow_except

EVALUATED = "--eval_strategy steps --eval_steps 3 --save_strategy steps --save_steps 3 --load_best_model_at_end true"
SHORT = f"--max_steps 6 {EVALUATED}"
LONG = "--max_steps 30"


@pytest.mark.slow
def test_trainer_logs_what_stock_deepspeed_does_also_after_a_resume_at_another_layout(tmp_path):
    runs: list[Any] = [
        ("stock", 2, None, SHORT),
        ("whole", 3, {"pipeline_ranks": 2}, SHORT),
        ("resumed", 2, {}, f"{SHORT} --resume_from_checkpoint {{folder}}/whole/checkpoint-3"),
    ]
    histories = train(tmp_path, runs)
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy"):
        for run in ("whole", "resumed"):
            assert logged(histories[run], key) == pytest.approx(logged(histories["stock"], key), rel=1e-5), (run, key)
    wanted, found = (AutoModelForCausalLM.from_pretrained(tmp_path / run).state_dict() for run in ("stock", "resumed"))
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "words", slow_except([], [LONG, f"{LONG} --lora --prediction_loss_only true", f"{LONG} --bf16"], slow=[LONG])
)
def test_trainer_logs_what_stock_deepspeed_does_over_30_steps(tmp_path, words):
    saving = f"{words} --save_strategy steps --save_steps 14"
    runs: list[Any] = [("stock", 2, None, words)]
    for pipeline, stage in ((1, 2), (2, 2), (2, 1), (1, 3)):
        name = f"{pipeline}-{stage}"
        resume = f"{words} --resume_from_checkpoint {{folder}}/{name}/checkpoint-14"
        block = {"pipeline_ranks": pipeline}
        runs += [(name, stage, block, saving), (f"{name}-resumed", stage, block, resume)]
    histories = train(tmp_path, runs)
    tolerance = 1e-2 if "bf16" in words else 1e-5
    assert len(logged(histories["stock"], "loss")) == 30
    for name, history in histories.items():
        assert logged(history, "loss") == pytest.approx(logged(histories["stock"], "loss"), rel=tolerance), name


BEST = (
    "--eval_strategy steps --eval_steps 1 --save_strategy steps --save_steps 1 --save_total_limit 1 "
    "--load_best_model_at_end true --metric_for_best_model eval_loss --greater_is_better true"
)


@pytest.mark.slow
def test_a_trainer_loads_pretrained_weights_in_shards_and_removes_checkpoints_that_a_thread_writes(tmp_path):
    tiny("gpt2").save_pretrained(tmp_path / "model")
    words = "--max_steps 6 --model {folder}/model"
    background = {"pipeline_ranks": 2, "asynchronous_save": True}
    runs: list[Any] = [("stock", 2, None, words)]
    # At stage 3 from_pretrained partitions with zero.Init what it loads.
    runs += [(f"pretrained-{pipeline}", 3, {"pipeline_ranks": pipeline}, words) for pipeline in (1, 2)]
    runs += [("limited", 3, background, f"{words} --save_strategy steps --save_steps 1 --save_total_limit 1")]
    runs += [("best", 3, background, f"{words} {BEST}")]
    runs += [("resumed", 3, background, f"{words} --resume_from_checkpoint {{folder}}/limited/checkpoint-6")]
    histories = train(tmp_path, runs)
    for name, history in histories.items():
        assert logged(history, "loss") == pytest.approx(logged(histories["stock"], "loss"), rel=1e-5), name
    assert [folder.name for folder in (tmp_path / "limited").glob("checkpoint-*")] == ["checkpoint-6"]
    losses = logged(histories["best"], "eval_loss")
    best = 1 + losses.index(max(losses))
    assert [folder.name for folder in (tmp_path / "best").glob("checkpoint-*")] == [f"checkpoint-{best}"]


@pytest.mark.slow
def test_a_trainer_in_fp16_scales_its_loss_as_stock_deepspeed_does(tmp_path):
    words = "--max_steps 8 --fp16 true"
    runs: list[Any] = [("stock", 2, None, words)]
    runs += [
        (f"{pipeline}-{stage}", stage, {"pipeline_ranks": pipeline}, words) for pipeline, stage in ((2, 2), (1, 3))
    ]
    histories = train(tmp_path, runs)
    for name, history in histories.items():
        for key in ("loss", "grad_norm"):
            # Ten roundings of fp16. Other processors round other sums; a wrong scale would differ by a factor of 2.
            assert logged(history, key) == pytest.approx(logged(histories["stock"], key), rel=5e-3), (name, key)


EXPERTS = [(name, ranks) for name in (*BALANCED, "DeepSeek-V3") for ranks in (1, 2, 4)]
"""Models with experts, three of which balance them by a loss, and how many ranks train them."""


@pytest.mark.parametrize(("name", "ranks"), slow_except([], EXPERTS, several=True, slow=[("Mixtral with balance", 2)]))
def test_a_trainer_logs_what_stock_deepspeed_does_of_experts_in_all_layouts(tmp_path, name, ranks):
    make(name).save_pretrained(tmp_path / "model")
    words = "--max_steps 4 --model {folder}/model"
    runs: list[Any] = [("stock", 2, None, words)]
    for pipeline, stage in product((1, 2) if ranks > 1 else (1,), range(4)):
        runs.append((f"{pipeline}-{stage}", stage, {"pipeline_ranks": pipeline}, words))
    histories = train(tmp_path, runs, ranks)
    for run, history in histories.items():
        for key in ("loss", "grad_norm"):
            assert logged(history, key) == pytest.approx(logged(histories["stock"], key), rel=1e-5), (run, key)


OWN = [("a tied GPT", 2), ("a tied GPT", 1), ("a classifier", 2)]
LOOPS = [("Llama", 2, 2), ("GPT-2", 1, 3), ("GPT-2", 2, 3)]


@pytest.mark.parametrize(("name", "pipeline", "stage"), slow_except(LOOPS[:1], LOOPS, several=True))
def test_losses_of_accelerates_loop_are_those_of_one_process(tmp_path, name, pipeline, stage):
    make(name).save_pretrained(tmp_path / "pretrained")
    expected = train_alone(name, 2)
    folders = str(tmp_path / "pretrained"), str(tmp_path / "trained")
    ranks = run_on_ranks(2, train_with_accelerate, stage, {"pipeline_ranks": pipeline}, *folders)
    for (losses, again), wanted in zip(ranks, expected):
        assert losses == pytest.approx(wanted.losses, rel=1e-6)
        assert again == losses[-1:]
    AutoModelForCausalLM.from_pretrained(tmp_path / "trained")


@pytest.mark.parametrize(("name", "pipeline"), slow_except([("a tied GPT", 2)], OWN, several=True))
def test_accelerate_trains_models_of_ones_own(name, pipeline):
    block = {"pipeline_ranks": pipeline, **own_models.BLOCKS.get(name, {})}
    ranks = run_on_ranks(2, train_own_model_with_accelerate, name, 3, block)
    for losses, wanted in zip(ranks, train_alone(name, 2)):
        assert losses == pytest.approx(wanted.losses, rel=1e-6)


def train(folder: Path, runs: list[Any], ranks: int = 2) -> dict[str, list[dict[str, float]]]:
    """Runs the Trainer's script on ``ranks``, and returns the histories by the names of ``runs``."""
    torchrun(ranks, ["-m", "tests.integrations.deepspeed.plain.accelerated", str(folder), json.dumps(runs)])
    return {name: json.loads((folder / name / "history.json").read_text()) for name, *_ in runs}


def logged(history: list[dict[str, float]], key: str) -> list[float]:
    return [entry[key] for entry in history if key in entry]
