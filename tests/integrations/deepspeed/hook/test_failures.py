"""However a rank of a DeepSpeed job breaks, and whoever started it: all ranks end in time, the launcher says so, the
survivors name the rank, and nothing is left behind."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from testing import ROOT, SCRIPTS
from testing.launching import ON_CPU, free_port
from testing.processes import is_alive, wait
from tests.slow import slow_except

SCRIPT = SCRIPTS / "breaks.py"
HOST = socket.gethostname()
RANKS, LIMIT = 4, 6
DEATH, STALL = 25, LIMIT + 25
"""Seconds from the fault in which all ranks that can end have ended, also on a busy machine. Launchers kill ranks after
30."""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SRUN = """#!/bin/bash
# Starts the command once per node, all on this machine, and waits for all of them.
nodes=$2
while [ "$1" != torchrun ]; do shift; done
shift
for ((node = 0; node < nodes; node++)); do {torchrun} "$@" & done
status=0
for ((node = 0; node < nodes; node++)); do wait -n || status=1; done
exit $status
"""


def torchrun(folder):
    return [*TORCHRUN, "--standalone", "--nproc_per_node", str(RANKS), "-m", "ds_lgamp", "run"], {}


def deepspeed(folder):
    launcher = Path(sys.executable).with_name("deepspeed")
    return [launcher, "--num_gpus", str(RANKS), "--master_port", str(free_port()), "--module", "ds_lgamp", "run"], {}


def slurm(folder):
    """launch/slurm.sh on two nodes, with a srun that starts both on this machine and kills nobody."""
    (folder / "srun").write_text(SRUN.format(torchrun=shlex.join(TORCHRUN)))
    (folder / "srun").chmod(0o755)
    place = {"SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "2", "GPUS_PER_NODE": "2"}
    place |= {"PATH": f"{folder}:{os.environ['PATH']}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return ["bash", str(ROOT / "launch" / "slurm.sh")], place


LAUNCHERS = {"torchrun": torchrun, "deepspeed": deepspeed, "slurm": slurm}
DIED = rf"rank 3 on {HOST} died"
STANDS = r"rank \d has waited \d+ s .* of step 3 for .*rank 3 "
SAYS = {
    "raises": rf"rank 3 on {HOST} failed \(ActionError: rank 3 \(pipeline rank 1\) failed at F1.0 of step 3: Arith.*\)",
    "is killed": DIED,
    "is terminated": DIED,
    "segfaults": DIED,
    "exits": DIED,
    "stops": rf"{STANDS}does not answer since .*",
    "sleeps": rf"{STANDS}stands in F\d\.0 for \d+ s and waits for no rank",
    "kills its launcher": rf"rank \d on {HOST} lost its launcher \(process \d+\), which was killed or has ended",
    "has no data": rf"{STANDS}stands where it reads the data for \d+ s and waits for no rank",
}
STALLS = ("stops", "sleeps", "has no data")


class Outcome:
    """A job that has ended.

    Args:
        statuses: the launcher's exit status.
        seconds: from the fault to the end of the last rank that can end.
        output: what all processes wrote.
        left: processes and shared memory that remain.
    """

    def __init__(self, status, seconds, output, left):
        self.status, self.seconds, self.output, self.left = status, seconds, output, left


def run(launcher, fault, engine, folder):
    words, place = LAUNCHERS[launcher](folder)
    environment = {**os.environ, **ON_CPU, "PYTHONPATH": str(ROOT), **place}
    with tempfile.TemporaryFile("w+") as output:
        job = subprocess.Popen(
            [*map(str, words), str(SCRIPT), fault, engine, str(folder)],
            **{"cwd": ROOT, "env": environment, "stdout": output, "stderr": subprocess.STDOUT},
        )
        ranks: list[int] = []
        try:
            wait(lambda: (folder / "broken").exists() or job.poll() is not None, 150)
            began = time.monotonic()
            ranks = [int(file.read_text()) for file in folder.glob("rank *")]
            can_end = [pid for pid in ranks if fault != "stops" or pid != int((folder / "rank 3").read_text())]
            wait(lambda: not any(map(is_alive, can_end)), 60)
            seconds = time.monotonic() - began
            status = job.wait(60)
            time.sleep(0.5)
            left = [str(pid) for pid in ranks if is_alive(pid)]
            left += [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in ranks)]
        finally:
            for pid in filter(is_alive, ranks):
                os.kill(pid, signal.SIGKILL)
            job.kill()
            job.wait()
        output.seek(0)
        return Outcome(status, seconds, output.read(), left)


SLOW = [("torchrun", fault, "pipeline") for fault in ("is killed", "stops", "has no data", "kills its launcher")]
SLOW += [("torchrun", "is killed", "plain"), ("deepspeed", "is killed", "pipeline"), ("slurm", "is killed", "pipeline")]
"""Every launcher, engine and kind of fault. Disturbed jobs (testing/chaos) have them all, at random."""
CASES = [*SLOW, *(("torchrun", fault, "pipeline") for fault in SAYS if ("torchrun", fault, "pipeline") not in SLOW)]
CASES += [("torchrun", fault, "plain") for fault in ("stops", "raises", "sleeps")]
FEW = ("exits", "stops", "kills its launcher")
CASES += [(launcher, fault, "pipeline") for launcher in ("deepspeed", "slurm") for fault in FEW]


@pytest.mark.parametrize(("launcher", "fault", "engine"), slow_except([], CASES, several=True, slow=SLOW))
def test_a_rank_that_breaks_ends_the_job_and_is_named(launcher, fault, engine, tmp_path):
    outcome = run(launcher, fault, engine, tmp_path)
    assert (tmp_path / "broken").exists(), outcome.output
    # The runner of deepspeed takes a launcher that a signal has ended for one that ended well.
    assert outcome.status != 0 or (launcher, fault) == ("deepspeed", "kills its launcher"), outcome.output
    assert outcome.seconds < (STALL if fault in STALLS else DEATH), outcome.output
    assert not outcome.left
    for rank in range(RANKS - 1):
        # The launcher may have terminated this one at once.
        own = rf"; this rank, {rank} on {HOST}, ends (in|at|between|where|outside)\b.* step \d"
        assert re.search(rf"ds_lgamp: {SAYS[fault]}{own}", outcome.output), outcome.output


@pytest.mark.parametrize("engine", slow_except([], ["pipeline", "plain"], slow=["pipeline"]))
def test_a_rank_that_returns_early_ends_the_job(engine, tmp_path):
    outcome = run("torchrun", "returns", engine, tmp_path)
    assert (tmp_path / "broken").exists() and outcome.status != 0, outcome.output
    assert outcome.seconds < STALL and not outcome.left, outcome.output
