"""Runs Accelerate's nlp_example.py and complete_nlp_example.py by ``accelerate launch`` with a configuration file.

Both download BERT, GLUE and its metric. Folders of these names in the working directory stand in for them: a small BERT
and its vocabulary, pairs of lines of this project's documentation, and a metric that counts right answers. The scripts
need the packages datasets and evaluate.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from testing.public.deepspeed_scripts import numbers_of
from testing.public.outcome import Case, compared, without_block
from testing.public.transformers_scripts import MASKED, RANKS, make_material

STOCK_STAGE = 2
ROWS = 64
"""Of each part of the data."""
SPLIT = {"pipeline_ranks": 2, "chunks_per_rank": 2}
SHORT, COMPLETE = "nlp_example.py", "complete_nlp_example.py"
MODEL, DATA, METRIC = "bert-base-cased", "nyu-mll/glue", "glue"
"""What the scripts ask for."""
LAUNCHED = f"""
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: ds_config.json
  zero3_init_flag: false
num_machines: 1
num_processes: {RANKS}
"""
PARTS = """---
configs:
- config_name: mrpc
  data_files:
  - {split: train, path: train.jsonl}
  - {split: validation, path: validation.jsonl}
---
"""
COUNTED = """
import datasets
import evaluate


class Counted(evaluate.Metric):
    def _info(self):
        kinds = {name: datasets.Value("int64") for name in ("predictions", "references")}
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(kinds))

    def _compute(self, predictions, references):
        right = sum(one == other for one, other in zip(predictions, references)) / len(references)
        return {"accuracy": right, "f1": right}
"""


def cases(tree: Path, folder: Path) -> Iterable[Case]:
    """Returns the cases on two ranks. Stock trains at stage 2. The losses of all batches and the norms of all gradients
    are compared."""
    material = cache(partial(_material, folder))

    def train(script: str, stage: int, block: Mapping[str, Any] | None, *words: str) -> list[float]:
        material()
        ours = {} if block is None else {"ds_lgamp": block}
        config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": stage}, **ours}
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "launched.yaml"]
        # On a CPU, Accelerate would believe that every rank is alone.
        program = ["-m", "testing.accelerate_cpu", str(tree / "examples" / script), *words]
        variables = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
        return numbers_of(lambda _: [*launcher, *program], config, folder, variables)

    stock = cache(lambda script: without_block(lambda: train(script, STOCK_STAGE, None)))

    def compare(script: str, stage: int, block: Mapping[str, Any]) -> str:
        alone = stock(script)
        return compared(train(script, stage, block), alone)

    def resumed(stage: int, *blocks: Mapping[str, Any] | None) -> list[float]:
        """Trains with the first block, goes on from the first epoch's end with the second, and returns what is recorded
        from there."""
        saved = str(folder / f"saved_{stage}")
        train(COMPLETE, stage, blocks[0], "--checkpointing_steps", "epoch", "--output_dir", saved)
        return train(COMPLETE, stage, blocks[1], "--resume_from_checkpoint", f"{saved}/epoch_0")

    def compare_resumed() -> str:
        # Accelerate shows an epoch's batches again when it goes on, also without a block.
        alone = without_block(partial(resumed, STOCK_STAGE, None, None))
        return compared(resumed(3, SPLIT, {}), alone)

    yield Case(f"{SHORT}, P2, ZeRO-2, random BERT, own pairs", partial(compare, SHORT, 2, SPLIT))
    yield Case(f"{SHORT}, P2, ZeRO-3", partial(compare, SHORT, 3, SPLIT))
    yield Case(f"{SHORT}, W{RANKS}, ZeRO-3", partial(compare, SHORT, 3, {}))
    yield Case(f"{COMPLETE}, P2, ZeRO-3, resumed as W{RANKS}", compare_resumed)


def _material(folder: Path) -> None:
    """Writes what the scripts ask for, under the names by which they do."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    text, models = make_material(folder)
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig.from_pretrained(models[MASKED])).save_pretrained(folder / MODEL)
    AutoTokenizer.from_pretrained(models[MASKED]).save_pretrained(folder / MODEL)
    lines = [line for line in text.read_text().splitlines() if len(line) > 40]
    rows = [
        {"sentence1": lines[number], "sentence2": lines[-number - 1], "label": number % 2, "idx": number}
        for number in range(2 * ROWS)
    ]
    data = folder / DATA
    data.mkdir(parents=True)
    for name, part in (("train", rows[:ROWS]), ("validation", rows[ROWS:])):
        (data / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    (data / "README.md").write_text(PARTS)
    (folder / METRIC).mkdir()
    (folder / METRIC / f"{METRIC}.py").write_text(COUNTED)
    (folder / "launched.yaml").write_text(LAUNCHED)
