"""Runs sft.py, dpo.py, kto.py and reward.py of trl, whose trainers compute losses of what the model returns.

The model, its vocabulary and the data are small and made here, of this project's documentation. The scripts need the
packages trl and datasets.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from testing.public.outcome import Case, compared, without_block
from testing.public.transformers_scripts import CAUSAL, RANKS, STEPS, STOCK_STAGE, launch, make_material, write_config

ROWS, WORDS = 64, 6
"""Of the data, and of each of its texts."""
TRAINED = (
    f"--use_cpu --bf16 False --report_to none --per_device_train_batch_size 2 --gradient_accumulation_steps 4 "
    f"--max_steps {STEPS} --logging_steps 1 --learning_rate 1e-3 --max_length 48 --save_strategy steps "
    f"--save_steps {STEPS}"
).split()
SPLIT = {"pipeline_ranks": 2, "chunks_per_rank": 2, "outputs": "all"}


def _texts(parts: list[str]) -> dict[str, Any]:
    return {"text": " ".join(parts)}


def _preferences(parts: list[str]) -> dict[str, Any]:
    prompt, chosen, rejected = parts
    return {"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"}


def _judged(parts: list[str]) -> dict[str, Any]:
    prompt, completion, other = parts
    return {"prompt": prompt, "completion": f" {completion}", "label": len(completion) > len(other)}


ROWS_OF: dict[str, Callable[[list[str]], dict[str, Any]]] = {
    "sft": _texts,
    "dpo": _preferences,
    "kto": _judged,
    "reward": _preferences,
}


def cases(tree: Path, folder: Path) -> Iterable[Case]:
    """Returns the cases on two ranks. Stock trains at stage 2. The losses of all steps are compared."""
    sizes = {name: "auto" for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")}
    material = cache(partial(make_material, folder))

    def train(script: str, stage: int, block: Mapping[str, Any]) -> list[float]:
        text, models = material()
        output = folder / "trained" / str(len(list(folder.glob("trained/*"))))
        config = {**sizes, "zero_optimization": {"stage": stage}, **block}
        data = ["--model_name_or_path", str(models[CAUSAL]), "--dataset_name", str(_written(text, folder, script))]
        named = ["--deepspeed", str(write_config(folder, config)), "--output_dir", str(output)]
        launch(config, [str(tree / "trl" / "scripts" / f"{script}.py"), *data, *TRAINED, *named], folder)
        history = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
        return [entry["loss"] for entry in history if "loss" in entry]

    stock = cache(lambda script: without_block(lambda: train(script, STOCK_STAGE, {})))

    def compare(script: str, stage: int, block: Mapping[str, Any]) -> str:
        alone = stock(script)
        return compared(train(script, stage, {"ds_lgamp": block}), alone)

    for script in ROWS_OF:
        yield Case(f"{script}.py, P2, ZeRO-2", partial(compare, script, 2, SPLIT))
    for script in ("sft", "dpo"):
        yield Case(f"{script}.py, W{RANKS}, ZeRO-3", partial(compare, script, 3, {"outputs": "all"}))


def _written(text: Path, folder: Path, script: str) -> Path:
    """Writes the data of a script, and returns their folder."""
    path = folder / "data" / script
    path.mkdir(parents=True, exist_ok=True)
    words = text.read_text().split()
    parts = [" ".join(words[start : start + WORDS]) for start in range(0, 3 * ROWS * WORDS, WORDS)]
    rows = [ROWS_OF[script](parts[start : start + 3]) for start in range(0, 3 * ROWS, 3)]
    (path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path
