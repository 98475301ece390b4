"""Runs the example of docs/transformers.md as the page shows it."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from testing import ROOT
from testing.launching import ON_CPU, run

PAGE = (ROOT / "docs" / "transformers.md").read_text()
SCRIPT, LORA = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
(CONFIG,) = re.findall(r"^```json\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
(COMMAND,) = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
STEPS = 2 * 64 // (2 * 4 * 2)
"""Two epochs of 64 samples: 2 ranks, 4 micro-batches of 2 samples each."""
WITH_LORA = SCRIPT.replace("\nengine, *_ = ", f"\n{LORA}\nengine, *_ = ", 1)


def losses(folder: Path, script: str, enabled: bool) -> list[float]:
    """Runs the page's command and returns the losses that it prints."""
    config = json.loads(CONFIG)
    config["ds_lgamp"]["enabled"] = enabled
    (folder / "ds_config.json").write_text(json.dumps(config))
    (folder / "train.py").write_text(script)
    torchrun, *words = shlex.split(COMMAND)
    assert torchrun == "torchrun"
    environment = {**ON_CPU, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    launcher = [sys.executable, "-m", "torch.distributed.run", *words]
    return [float(loss) for loss in re.findall(r"^loss ([\d.]+)$", run(launcher, 300, environment, folder), re.M)]


@pytest.mark.slow
@pytest.mark.parametrize("script", [SCRIPT, WITH_LORA], ids=["whole", "LoRA"])
def test_the_example_trains_the_same_with_a_block_and_without(tmp_path, script):
    with_block, stock = (losses(tmp_path, script, enabled) for enabled in (True, False))
    assert len(stock) == STEPS
    assert with_block == pytest.approx(stock, rel=1e-5)
    assert stock[-1] < stock[0]


def test_the_example_is_short():
    assert len(SCRIPT.splitlines()) <= 32
