"""Runs the examples of docs/transformers.md, docs/lora.md and docs/own_models.md as the pages show them, but under
``ds_lgamp run``."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from testing import ROOT
from testing.launching import ON_CPU, recorded, run


def blocks(page: str, language: str) -> list[str]:
    """Returns the blocks of a page in a language."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


OF_TRANSFORMERS, OWN = "transformers.md", "own_models.md"
(SCRIPT,), (LORA,) = blocks(OF_TRANSFORMERS, "python"), blocks("lora.md", "python")
(OWN_SCRIPT,) = blocks(OWN, "python")
STEPS = 2 * 64 // (2 * 4 * 2)
"""Two epochs of 64 samples: 2 ranks, 4 micro-batches of 2 samples each."""
SCRIPTS = {
    "whole": (OF_TRANSFORMERS, SCRIPT),
    "LoRA": (OF_TRANSFORMERS, SCRIPT.replace("\nengine, *_ = ", f"\n{LORA}\nengine, *_ = ", 1)),
    "own model": (OWN, OWN_SCRIPT),
}


def losses(folder: Path, page: str, script: str, enabled: bool) -> list[float]:
    """Runs the page's command and returns the losses that it prints."""
    ((config,), (command,)) = blocks(page, "json"), blocks(page, "bash")
    settings = json.loads(config)
    settings["ds_lgamp"] |= {"enabled": enabled, "trace": str(folder / "trace"), "trace_steps": "1:1"}
    (folder / "ds_config.json").write_text(json.dumps(settings))
    (folder / "train.py").write_text(script)
    torchrun, *words = shlex.split(command)
    assert torchrun == "torchrun"
    environment = {**ON_CPU, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    # Then DeepSpeed does not compile its collectives for some minutes.
    words[words.index("train.py") :] = ["-m", "ds_lgamp", "run", "train.py"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *words]
    printed = run(launcher, 300, environment, folder)
    assert not enabled or recorded(folder / "trace")
    return [float(loss) for loss in re.findall(r"^loss ([\d.]+)$", printed, re.M)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_example_trains_the_same_with_a_block_and_without(tmp_path, name):
    with_block, stock = (losses(tmp_path, *SCRIPTS[name], enabled) for enabled in (True, False))
    assert len(stock) == STEPS
    assert with_block == pytest.approx(stock, rel=1e-5)
    assert stock[-1] < stock[0]


def test_the_examples_are_short():
    assert len(SCRIPT.splitlines()) <= 32 and len(OWN_SCRIPT.splitlines()) <= 65
