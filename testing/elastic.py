"""Runs a job under launch/elastic.sh whose nodes and ranks can be killed. Nodes are agents on this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from testing import ROOT, SCRIPTS
from testing.launching import ON_CPU, free_port

SCRIPT = SCRIPTS / "goes_on.py"
GATHERING = 3
"""Seconds for which agents wait for more nodes when there are enough."""


class Step(NamedTuple):
    """A training step, as the script logs it when it is over."""

    step: int
    loss: float
    rate: float
    """The learning rate."""
    ranks: int
    time: float
    """Seconds since 1970."""


class Job:
    """A job of testing/scripts/goes_on.py. The first node that starts must not be killed: the others meet there.

    Args:
        folder: for checkpoints, losses and output.
        nodes: the fewest and most nodes.
        ranks_per_node: ranks of each.
        config: ds_config.json.
        words: arguments of the script.
    """

    def __init__(self, folder: Path, nodes: str, ranks_per_node: int, config: Mapping[str, Any], *words: object):
        self.folder = folder
        self._losses = folder / "losses"
        file = folder / "ds_config.json"
        file.write_text(json.dumps(config))
        places = ["--deepspeed_config", file, "--checkpoints", folder / "checkpoints", "--losses", self._losses]
        self._command = ["bash", ROOT / "launch" / "elastic.sh", SCRIPT, *places, *words]
        self._port, self._spans_nodes = free_port(), nodes != "1"
        settings = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "NNODES": nodes,
            "GPUS_PER_NODE": str(ranks_per_node),
            "GATHERING": str(GATHERING),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
        }
        self._environment = {**os.environ, **ON_CPU, **settings}
        self._agents: dict[str, psutil.Popen] = {}

    def start(self, node: str) -> None:
        is_first = not self._agents
        with open(self.folder / f"{node}.txt", "a") as output:
            self._agents[node] = psutil.Popen(
                [str(word) for word in self._command],
                cwd=ROOT,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        if is_first and self._spans_nodes:
            self._await_meeting_place()

    def _await_meeting_place(self) -> None:
        """Waits until the first node takes connections: another that came earlier would become the meeting place."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self._port)).close()
                return
            time.sleep(0.05)
        raise AssertionError(self.output())

    def kill_node(self, node: str) -> None:
        """Kills the agent of ``node`` and all its ranks at once, as a power cut does."""
        agent = self._agents.pop(node)
        for process in (agent, *agent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        agent.wait()

    def kill_rank(self, node: str) -> None:
        """Kills one rank of ``node``."""
        self._agents[node].children()[0].send_signal(signal.SIGKILL)

    def steps(self) -> list[Step]:
        """Returns the steps so far, in the order in which they ended. Some were made again after a failure."""
        lines = self._losses.read_text().splitlines() if self._losses.exists() else []
        return [Step(**json.loads(line)) for line in lines]

    def wait_for(self, condition: Callable[[Step], bool], seconds: float = 120) -> Step:
        """Waits for a new step for which ``condition`` holds, and returns it. Raises AssertionError with what the nodes
        printed if none comes in time, or if a node ends before."""
        seen, deadline = len(self.steps()), time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = next(filter(condition, self.steps()[seen:]), None)
            if found is not None:
                return found
            assert all(agent.poll() is None for agent in self._agents.values()), self.output()
            time.sleep(0.05)
        raise AssertionError(f"no such step within {seconds} s\n{self.output()}")

    def finish(self, seconds: float = 120) -> None:
        """Waits for the end. Raises AssertionError with what the nodes printed if it is not a good one."""
        for agent in self._agents.values():
            assert agent.wait(seconds) == 0, self.output()

    def output(self) -> str:
        return "\n".join(f"== {file.stem}\n{file.read_text()}" for file in sorted(self.folder.glob("*.txt")))


@contextmanager
def job(*arguments: Any) -> Iterator[Job]:
    """A :class:`Job` of which nothing runs after the block."""
    made = Job(*arguments)
    try:
        yield made
    finally:
        for node in list(made._agents):
            with suppress(psutil.NoSuchProcess):
                made.kill_node(node)
