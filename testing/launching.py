"""Starts scripts on several ranks of this machine on the CPU, as torchrun does."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from testing import ROOT

ON_CPU = {
    **{"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
    # Keeps public trees unchanged.
    "PYTHONDONTWRITEBYTECODE": "1",
}


def torchrun(ranks: int, words: Sequence[str], seconds: float = 240, environment: Mapping[str, str] = ON_CPU) -> str:
    """Runs ``words`` on ``ranks`` processes and returns their output.

    Raises AssertionError with the output if they fail or take longer than ``seconds``.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return run([*launcher, *words], seconds, environment)


def run(words: Sequence[str], seconds: float, environment: Mapping[str, str] = ON_CPU, cwd: Path = ROOT) -> str:
    """Runs a command and returns its output. Raises AssertionError as :func:`torchrun` does."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            words, **{"cwd": cwd, "env": {**os.environ, **environment}, "stdout": output, "stderr": subprocess.STDOUT}
        )
        try:
            status: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            # torchrun ends its ranks when it is terminated.
            process.terminate()
            process.wait()
            status = f"none within {seconds:.0f} seconds"
        output.seek(0)
        written = output.read()
    assert status == 0, f"exit status: {status}\n{written}"
    return written
