"""Runs docs/first_run.md as the page shows it, but trains under ``ds_lgamp run``."""

import json
import os
import re
import shlex
import sys

import pytest

from testing import ROOT
from testing.launching import ON_CPU, recorded, run

PAGE = (ROOT / "docs" / "first_run.md").read_text()
(SCRIPT,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
STOCK, WITH_BLOCK = re.findall(r"^```json\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
TRAIN_STOCK, EXPLAIN, TRAIN = re.findall(r"^```bash\nDS_ACCELERATOR=cpu (.*?)\n```$", PAGE, re.DOTALL | re.MULTILINE)


def printed(folder, config, command):
    """Returns what a command of the page prints."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "ds_config.json").write_text(config)
    program, *words = shlex.split(command)
    module = {"torchrun": "torch.distributed.run", "ds_lgamp": "ds_lgamp"}[program]
    environment = {**ON_CPU, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    return run([sys.executable, "-m", module, *words], 300, environment, folder)


@pytest.mark.slow
def test_the_script_trains_the_same_with_a_block_and_without(tmp_path):
    # Under `ds_lgamp run`, DeepSpeed does not compile its collectives for some minutes.
    stock, ours = (each.replace("train.py", "-m ds_lgamp run train.py") for each in (TRAIN_STOCK, TRAIN))
    traced = json.loads(WITH_BLOCK)
    traced["ds_lgamp"] |= {"trace": "recorded", "trace_steps": "1:1"}
    losses = [
        re.findall(r"^step (?:10|20) loss .*$", printed(tmp_path, config, command), re.MULTILINE)
        for config, command in ((STOCK, stock), (json.dumps(traced), ours))
    ]
    assert recorded(tmp_path / "recorded")
    assert len(losses[0]) == 2 and losses[0] == losses[1]


@pytest.mark.slow
def test_the_block_is_explained(tmp_path):
    told = printed(tmp_path, WITH_BLOCK, EXPLAIN)
    assert "8 layers in 4 chunks" in told
    assert "would gather about 2*N*M = 2*4*8 = 64 times per step and rank, not 6." in told
