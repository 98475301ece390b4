"""Trains a small BERT on the documentation of Python, with stock DeepSpeed and with a block: ``python -m benchmarks run
bert_learning``.

Both runs are ``launch/pretrain_bert.py`` with the same flags, and without dropout, so that their losses can be compared
number by number. Then ``launch/finetune_bert.py`` fine-tunes the model of the second run, and the same model from
scratch.
"""

import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.record import OURS, Record, begin
from testing import ROOT
from testing.launching import run as run_script
from testing.launching import torchrun

NAME = "bert_learning"
RANKS = 2
STOCK = "DeepSpeed"
BLOCKS: dict[str, dict[str, Any]] = {STOCK: {"enabled": False}, OURS: {"schedule": "layered"}}
FLAGS = (
    "--sequence-lengths 128 --steps 240 --batch-size 32 --micro-batch-size 8 --lr 2e-3 --num-layers 2 --dropout 0 "
    "--log-interval 20 --eval-interval 40"
)
FINE_TUNING = "--steps 60 --lr 3e-4"
UNIGRAMS, PRETRAINED, SCRATCH, FREQUENT = "unigrams", "pretrained", "from scratch", "always the most frequent source"
METRICS = ("masked tokens loss", "masked tokens accuracy", "next sentences loss", "next sentences accuracy")
EVALUATION = re.compile(
    r"step (\d+) \| held out: masked tokens loss ([\d.]+), accuracy ([\d.]+) \(unigrams: loss ([\d.]+)\); "
    r"next sentences loss ([\d.]+), accuracy ([\d.]+)"
)
LOSS = re.compile(r"step (\d+) \| loss ([\d.]+)")
PASSAGES = re.compile(r"accuracy ([\d.]+) \(always the most frequent source: ([\d.]+)\)")
LIMIT_SECONDS = 600
CLOSE = 1e-3
"""Largest relative difference of training losses. Rounding grows with the steps."""


class Learned(NamedTuple):
    """What a run printed."""

    losses: dict[int, float]
    """Training losses by step."""
    held_out: dict[int, tuple[float, ...]]
    """The values of ``METRICS`` by step."""
    unigrams: float
    seconds: float


def run(flags: str = FLAGS, fine_tuning: str = FINE_TUNING, files: tuple[str, ...] = ()) -> Record:
    """Trains and compares.

    Args:
        flags: of launch/pretrain_bert.py.
        fine_tuning: flags of launch/finetune_bert.py.
        files: text; by default the documentation inside this Python installation.
    """
    record = begin(NAME)
    record.machine |= {"ranks": RANKS, "flags": flags}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, files)
        learned = {
            contender: pretrain(folder, f"{flags} --save {folder / str(number)}", block)
            for number, (contender, block) in enumerate(BLOCKS.items())
        }
        model = f"--model {folder}/1/model"
        passages = {
            start: fine_tune(folder, f"{fine_tuning} {model} {flag}")
            for start, flag in ((PRETRAINED, ""), (SCRATCH, "--from-scratch"))
        }
    enter(record, learned, passages)
    return record


def prepare(folder: Path, files: tuple[str, ...]) -> None:
    words = ["launch/prepare_data.py", "--bert", *files, "--output-prefix", f"{folder / 'text'}"]
    run_script([sys.executable, *words], LIMIT_SECONDS)


def pretrain(folder: Path, flags: str, block: Mapping[str, Any]) -> Learned:
    """Trains with a block. Returns what the first rank printed."""
    begun = time.monotonic()
    printed = _script("pretrain_bert.py", folder, flags, block)
    seconds = time.monotonic() - begun
    evaluations = [[float(value) for value in values] for values in EVALUATION.findall(printed)]
    held_out = {int(step): (loss, right, *pairs) for step, loss, right, _, *pairs in evaluations}
    losses = {int(step): float(loss) for step, loss in LOSS.findall(printed)}
    return Learned(losses, held_out, evaluations[0][3], seconds)


def fine_tune(folder: Path, flags: str) -> tuple[float, float]:
    """Returns the accuracy, and that of naming always the most frequent source."""
    (found,) = PASSAGES.findall(_script("finetune_bert.py", folder, flags, {}))
    return float(found[0]), float(found[1])


def _script(name: str, folder: Path, flags: str, block: Mapping[str, Any]) -> str:
    """Runs a script of launch/ with the example's configuration in fp32. Returns its output."""
    config = json.loads((ROOT / "example_configs" / "bert.json").read_text())
    del config["bf16"], config["data_types"]
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}}
    path = folder / "ds_config.json"
    path.write_text(json.dumps({**config, "ds_lgamp": block}))
    data = ["--data", f"{folder / 'text'}.bert", "--deepspeed_config", str(path)]
    return torchrun(RANKS, ["-m", "ds_lgamp", "run", f"launch/{name}", *flags.split(), *data], 3 * LIMIT_SECONDS)


def enter(record: Record, learned: Mapping[str, Learned], passages: Mapping[str, tuple[float, float]]) -> None:
    """Enters the rows and the targets."""
    for contender, found in learned.items():
        for step, values in found.held_out.items():
            for metric, value in zip(METRICS, values):
                record.add(contender, {"step": step}, metric, [value], "")
        record.add(contender, {}, "seconds", [found.seconds], "s")
    stock, ours = learned[STOCK], learned[OURS]
    record.add(UNIGRAMS, {}, METRICS[0], [ours.unigrams], "")
    for start, (accuracy, _) in passages.items():
        record.add(start, {}, "passages accuracy", [accuracy], "")
    record.add(FREQUENT, {}, "passages accuracy", [passages[PRETRAINED][1]], "")
    assert stock.losses.keys() == ours.losses.keys()
    apart = max(abs(ours.losses[step] / loss - 1) for step, loss in stock.losses.items())
    record.aim("largest relative difference of training losses, ds_lgamp and stock", apart, CLOSE)
    last = ours.held_out[max(ours.held_out)]
    record.aim("held-out loss of masked tokens / loss of unigrams", last[0] / ours.unigrams, 1.0)
    record.aim("seconds of the run of ds_lgamp", ours.seconds, LIMIT_SECONDS)
    scratch, pretrained = (1 - passages[start][0] for start in (SCRATCH, PRETRAINED))
    record.aim("errors in passages, pretrained - from scratch", pretrained - scratch, 0.0)
