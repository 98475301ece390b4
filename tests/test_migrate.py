"""The commands of docs/migrate.md, run as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOSS = re.compile(r"iteration +(\d+) \| training loss ([\d.]+)")
COMMANDS = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "docs" / "migrate.md").read_text(), re.DOTALL | re.MULTILINE)


def run(folder: Path, commands: str) -> dict[int, float]:
    """The losses that ``commands`` print, by iteration."""
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
    return {int(iteration): float(loss) for iteration, loss in LOSS.findall(done.stdout)}


@pytest.fixture
def folder(tmp_path):
    """Where the page's relative paths lead."""
    for name in ("launch", "example_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "text.txt").write_text("\n\n".join(f"Section {number}: the quick brown fox." for number in range(99)))
    return tmp_path


def test_the_page_switches_over_and_back(folder):
    setup, stock, *rest = COMMANDS
    setup = setup.replace("prepare_data.py", "prepare_data.py text.txt --vocab-size 300")
    stayed = run(
        folder, setup + stock.replace("$FLAGS", "$FLAGS --exit-interval 12").replace("runs/stock", "runs/stayed")
    )
    switched = run(folder, "".join([setup, stock, *rest]))
    assert list(switched) == list(stayed) == list(range(1, 13))
    assert list(switched.values()) == pytest.approx(list(stayed.values()), rel=1e-5)
    assert switched[12] < switched[1] - 0.2
