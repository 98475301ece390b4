"""Starts scripts on several ranks of this machine, as torchrun does, on the CPU."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from testing import ROOT

ON_CPU = {
    **{"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
    # Public trees stay as they are.
    "PYTHONDONTWRITEBYTECODE": "1",
}


def torchrun(ranks: int, words: Sequence[str], seconds: float = 240, environment: Mapping[str, str] = ON_CPU) -> str:
    """Runs ``words`` on ``ranks`` processes and returns what they wrote.

    Raises AssertionError with it if they fail or take longer than ``seconds``.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return run([*launcher, *words], seconds, environment)


def run(words: Sequence[str], seconds: float, environment: Mapping[str, str] = ON_CPU, cwd: Path = ROOT) -> str:
    """What a command wrote. Raises AssertionError as :func:`torchrun` does."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            words, **{"cwd": cwd, "env": {**os.environ, **environment}, "stdout": output, "stderr": subprocess.STDOUT}
        )
        try:
            status: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            # Ended thus, torchrun ends its ranks.
            process.terminate()
            process.wait()
            status = f"none within {seconds:.0f} seconds"
        output.seek(0)
        written = output.read()
    assert status == 0, f"exit status: {status}\n{written}"
    return written
