"""An unedited script of the Trainer under ``ds_lgamp run``: from the launch to a resumed run, and refusals."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from testing import SCRIPTS
from testing.forks import run_module
from testing.launching import ON_CPU, free_port, recorded, torchrun
from tests.integrations.deepspeed.plain.accelerated import AUTO, WORDS
from tests.slow import slow_except

SAVED = "--max_steps 4 --save_strategy steps --save_steps 2 --eval_strategy steps --eval_steps 2"
RESUMED = "--max_steps 4 --eval_strategy steps --eval_steps 2 --resume_from_checkpoint {folder}/saved/checkpoint-2"

SMOOTHED = "--label_smoothing_factor 0.1"


@pytest.mark.parametrize("overlap_update", slow_except([], [False, True], slow=[True]))
def test_a_script_trains_evaluates_saves_and_resumes(overlap_update, tmp_path):
    config = written(tmp_path, {"pipeline_ranks": 2, "overlap_update": overlap_update})
    run(tmp_path, config, "saved", SAVED)
    run(tmp_path, config, "resumed", RESUMED)
    assert recorded(tmp_path / "saved, recorded") and recorded(tmp_path / "resumed, recorded")
    saved, resumed = (json.loads((tmp_path / run / "history.json").read_text()) for run in ("saved", "resumed"))
    for key, number in (("loss", 4), ("eval_loss", 2), ("eval_accuracy", 2)):
        values, again = ([entry[key] for entry in history if key in entry] for history in (saved, resumed))
        assert len(values) == number and again == values
    AutoModelForCausalLM.from_pretrained(tmp_path / "resumed")


@pytest.mark.parametrize("words", slow_except([], [SMOOTHED, "--own_loss"], slow=[SMOOTHED]))
def test_what_a_trainer_computes_of_logits_in_training_is_refused_in_one_sentence(words, tmp_path):
    with pytest.raises(AssertionError, match="ds_lgamp: .* which label_smoothing_factor, compute_loss_func, trl's"):
        run(tmp_path, written(tmp_path, {"pipeline_ranks": 2}), "refused", f"--max_steps 1 {words}")


def test_the_trainers_optimizer_of_8_bits_trains_as_without_deepspeed(tmp_path):
    pytest.importorskip("bitsandbytes")
    words = [*WORDS, *"--model gpt2 --optim adamw_8bit --max_steps 4".split()]
    ended = run_module(["testing.scripts.trains_with_trainer", "--output_dir", str(tmp_path / "alone"), *words])
    assert ended.status == 0, ended.complaints
    config = written(tmp_path, {}, without=("optimizer", "scheduler"))
    meeting = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = {**ON_CPU, **meeting, "MASTER_PORT": str(free_port())}
    ended = run_module(["ds_lgamp", "run", *told(tmp_path, config, "sharded"), *words], environment=environment)
    assert ended.status == 0, ended.complaints
    assert recorded(tmp_path / "sharded, recorded")
    alone, sharded = (json.loads((tmp_path / name / "history.json").read_text()) for name in ("alone", "sharded"))
    losses, found = ([entry["loss"] for entry in history if "loss" in entry] for history in (alone, sharded))
    assert len(losses) == 4 and found == pytest.approx(losses, rel=1e-5)


def written(folder: Path, block: dict[str, Any], without: Sequence[str] = ()) -> Path:
    """Writes a configuration of stage 3 and returns its file."""
    path = folder / "ds_config.json"
    config = {key: value for key, value in AUTO.items() if key not in without}
    path.write_text(json.dumps({**config, "zero_optimization": {"stage": 3}, "ds_lgamp": block}))
    return path


def told(folder: Path, config: Path, name: str) -> list[str]:
    """Returns what the command line says of a run by this name, whose third step is recorded."""
    script = [str(SCRIPTS / "trains_with_trainer.py"), "--deepspeed", str(config), "--output_dir", str(folder / name)]
    return ["--trace", str(folder / f"{name}, recorded"), "--trace-steps", "3:4", *script]


def run(folder: Path, config: Path, name: str, words: str) -> None:
    given = [*told(folder, config, name), *WORDS, *words.format(folder=folder).split()]
    torchrun(2, ["-m", "ds_lgamp", "run", *given])
