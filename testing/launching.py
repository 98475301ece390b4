"""Starts scripts on several ranks of this machine on the CPU, as torchrun does."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from ds_lgamp.view.recording import read_recording
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


def recorded(folder: Path) -> bool:
    """Whether a script that ``ds_lgamp run --trace FOLDER`` ran has recorded a step of every rank. Only an engine of
    ours does: a test that compares losses with those of stock DeepSpeed would not notice that it ran stock twice."""
    return all(rank.steps for rank in read_recording(folder).ranks)


def torchrun_on_nodes(words: Sequence[str], nodes: Sequence[str], seconds: float = 240) -> str:
    """Runs ``words`` under one torchrun per node, with two processes each. Returns what all print.

    Args:
        words: the command.
        nodes: the name of every node, as ``DS_LGAMP_NODE`` tells it.
        seconds: time limit.

    Raises AssertionError with the output of all if one fails, and TimeoutExpired if one takes longer.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(nodes)), "--nproc_per_node", "2"]
    meeting = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    environment = {**os.environ, **ON_CPU}
    with ExitStack() as files:
        # A pipe that nobody reads in time would stop its node, and with it all others.
        outputs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in nodes]
        processes = [
            subprocess.Popen(
                [*launcher, *meeting, "--node_rank", str(number), *words],
                env={**environment, "DS_LGAMP_NODE": node},
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for number, (node, output) in enumerate(zip(nodes, outputs))
        ]
        try:
            statuses = [process.wait(seconds) for process in processes]
        finally:
            for process in processes:
                process.terminate()
                process.wait()
        for output in outputs:
            output.seek(0)
        written = "\n".join(output.read() for output in outputs)
    assert not any(statuses), f"exit statuses: {statuses}\n{written}"
    return written


def free_port() -> int:
    """Returns a port at which nobody listens. It is none of those that the system gives to connections: other tests
    open many, and could take it before it is used."""
    while True:
        port = secrets.choice(range(15_000, 29_000))
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


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
