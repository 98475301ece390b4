"""Runs the training loop of docs/megatron.md as the page shows it, but on the CPU."""

import json
import re

import pytest

from testing import ROOT
from testing.launching import recorded, torchrun
from tests.slow import slow_except

PAGE = (ROOT / "docs" / "megatron.md").read_text()
(SCRIPT,) = [
    code
    for code in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    if "install_schedules" in code
]
RANKS = 4


def losses(folder, stage, **block):
    """Trains on two pipelines of two ranks. Returns the losses that the script prints."""
    file, script = folder / "ds_config.json", folder / "train.py"
    file.write_text(json.dumps({"zero_optimization": {"stage": stage}, "ds_lgamp": block}))
    script.write_text(SCRIPT.replace('"nccl"', '"gloo"').replace(file.name, str(file)))
    printed = torchrun(RANKS, ["-m", "testing.cpu_shim", str(script)])
    return [float(loss) for loss in re.findall(r"^loss ([\d.]+)$", printed, re.MULTILINE)]


@pytest.mark.parametrize("stage", slow_except([], [0, 3], slow=[3]))
def test_a_loop_of_ones_own_trains_as_without_a_block(tmp_path, stage):
    stock = losses(tmp_path, 0, enabled=False)
    assert len(stock) == 3 and stock[-1] < stock[0]
    traced = {"trace": str(tmp_path / "recorded"), "trace_steps": "1:1"}
    assert losses(tmp_path, stage, **traced) == pytest.approx(stock, rel=1e-6)
    assert recorded(tmp_path / "recorded")
