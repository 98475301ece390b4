"""Runs the commands of docs/migrate.md as the page shows them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from testing import ROOT

LOSS = re.compile(r"iteration +(\d+) \| training loss ([\d.]+)")
COMMANDS = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "docs" / "migrate.md").read_text(), re.DOTALL | re.MULTILINE)


def run(folder: Path, commands: str) -> list[tuple[int, float]]:
    """Returns the iterations that ``commands`` print, with their losses."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        ["bash", "-euc", commands], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [(int(iteration), float(loss)) for iteration, loss in LOSS.findall(done.stdout)]


@pytest.fixture
def folder(tmp_path):
    """Makes a folder in which the page's relative paths exist."""
    for name in ("launch", "example_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "text.txt").write_text("\n\n".join(f"Section {number}: the quick brown fox." for number in range(99)))
    return tmp_path


@pytest.mark.slow
def test_the_page_switches_over_and_back(folder):
    setup, stock, *rest = COMMANDS
    setup = setup.replace("prepare_data.py", "prepare_data.py text.txt --vocab-size 300")
    # The run that stays with stock DeepSpeed needs only one rank.
    stays = stock.replace("--nproc_per_node 4", "--nproc_per_node 1").replace("parallel-size 2", "parallel-size 1")
    stays = stays.replace("$FLAGS", "$FLAGS --exit-interval 12").replace("runs/stock", "runs/stayed")
    losses = run(folder, "".join([setup, stock, *rest, stays]))
    assert [iteration for iteration, _ in losses] == 2 * list(range(1, 13))
    switched, stayed = ([loss for _, loss in half] for half in (losses[:12], losses[12:]))
    assert switched == pytest.approx(stayed, rel=1e-5)
    assert switched[-1] < switched[0] - 0.2
