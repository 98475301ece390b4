"""Ranks whose launcher is killed, by real processes; the launcher here only starts them."""

import os
import shlex
import signal
import subprocess
import sys

import pytest

from testing import ROOT
from testing.processes import is_alive, wait

RANK = """
import os, time
from ds_lgamp.watch.this_rank import this_rank
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
this_rank.start()
print("rank", os.getpid(), flush=True)
time.sleep(1000)
"""
LAUNCHER = """
import os, subprocess, sys, time
subprocess.Popen(sys.argv[1:], env={**os.environ, "TORCHELASTIC_RUN_ID": "job"})
time.sleep(1000)
"""
DIRECT = [sys.executable, "-c", RANK]
BY_SHELL = ["bash", "-c", f"{shlex.join(DIRECT)}; true"]
"""A shell stays between the launcher and the rank."""


def started(words):
    """Returns the process that runs ``words``, and the number of the rank's process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    for line in process.stdout:
        if line.startswith("rank "):
            return process, int(line.split()[1])
    raise AssertionError("the rank did not start")


@pytest.mark.parametrize("words", [pytest.param(DIRECT, marks=pytest.mark.slow), BY_SHELL], ids=["direct", "by shell"])
def test_a_rank_alone_ends_with_a_sentence_when_its_launcher_is_killed(words):
    launcher, rank = started([sys.executable, "-c", LAUNCHER, *words])
    try:
        launcher.kill()
        wait(lambda: not is_alive(rank), 30)
        assert not is_alive(rank)
        expected = f"this rank lost its launcher (process {launcher.pid}), which was killed or has ended"
        assert expected in launcher.stdout.read()
    finally:
        launcher.stdout.close()
        launcher.wait()
        if is_alive(rank):
            os.kill(rank, signal.SIGKILL)


@pytest.mark.slow
def test_a_process_that_no_launcher_has_started_outlives_its_parent():
    shell, rank = started(["bash", "-c", f"{shlex.join(DIRECT)} & wait"])
    try:
        shell.kill()
        shell.wait()
        wait(lambda: not is_alive(rank), 4)
        assert is_alive(rank)
    finally:
        os.kill(rank, signal.SIGKILL)
        shell.stdout.close()
