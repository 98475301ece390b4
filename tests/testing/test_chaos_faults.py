"""The faults of testing.chaos do to a process what their names say."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.folder import write_latest
from ds_lgamp.checkpoint.whole import verify, write_whole
from testing import ROOT
from testing.chaos.faults import FAULTS
from testing.chaos.judge import DAMAGES, damage
from testing.checkpoints import example

MEETS = """
import threading, time
from pathlib import Path
from testing.scripts.meets_chaos import Trained

trained = Trained({{"folder": {folder!r}, "fault": {fault!r}, "rank": 0, "step": 3, "place": "data"}})
counted = Path({folder!r}) / "counted"

def count():
    while True:
        time.sleep(0.01)
        counted.write_text(str(time.monotonic()))

threading.Thread(target=count, daemon=True).start()
while not counted.exists():
    time.sleep(0.01)
for trained.step in range(1, 6):
    for place in ("forward", "data"):
        begun = time.monotonic()
        trained.meet(place)
        print(trained.step, place, round(time.monotonic() - begun, 1), flush=True)
time.sleep(0.1)
(Path({folder!r}) / "long").write_text("x" * 100)
"""


def started(folder, fault):
    code = MEETS.format(folder=str(folder), fault=fault)
    environment = {**os.environ, "RANK": "0", "PYTHONPATH": str(ROOT)}
    output = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=output, stderr=output, text=True)


def seconds_of(printed):
    return {tuple(line.split()[:2]): float(line.split()[2]) for line in printed.splitlines()}


@pytest.mark.parametrize(
    ("fault", "status"),
    [("exception", 1), ("segfault", -signal.SIGSEGV), ("SIGKILL", -signal.SIGKILL), ("SIGTERM", -signal.SIGTERM)],
)
def test_a_fault_ends_its_process_at_its_step_and_place(fault, status, tmp_path):
    process = started(tmp_path, fault)
    printed, error = process.communicate(timeout=60)
    assert process.returncode == status and (tmp_path / "fault").exists(), error
    assert list(seconds_of(printed))[-1] == ("3", "forward")


def test_no_fault_does_nothing(tmp_path):
    process = started(tmp_path, "")
    printed, error = process.communicate(timeout=60)
    assert process.returncode == 0 and not (tmp_path / "fault").exists() and len(seconds_of(printed)) == 10, error


def test_a_full_disk_takes_no_more_and_the_process_goes_on(tmp_path):
    process = started(tmp_path, "full disk")
    printed, error = process.communicate(timeout=60)
    assert len(seconds_of(printed)) == 10 and "OSError: [Errno 27] File too large" in error


def test_a_slow_rank_stays_slow(tmp_path):
    printed, _ = started(tmp_path, "slow rank").communicate(timeout=60)
    slow = [place for place, seconds in seconds_of(printed).items() if seconds >= 1.5]
    assert slow == [("3", "data"), ("4", "data"), ("5", "data")]


def test_a_pause_stops_the_process_and_ends(tmp_path):
    process = started(tmp_path, "pause")
    wait_until(lambda: state_of(process) == "T")
    printed, error = process.communicate(timeout=60)
    assert process.returncode == 0 and seconds_of(printed)["3", "data"] >= 1.5, error


@pytest.mark.parametrize(
    ("fault", "state", "threads_run"), [("SIGSTOP", "T", False), ("interpreter held", "S", False), ("sleep", "S", True)]
)
def test_other_threads_run_only_while_the_main_thread_sleeps_by_itself(fault, state, threads_run, tmp_path):
    process = started(tmp_path, fault)
    try:
        wait_until((tmp_path / "fault").exists)
        # The thread may be writing yet.
        time.sleep(0.3)
        counted = (tmp_path / "counted").read_text()
        time.sleep(0.5)
        assert ((tmp_path / "counted").read_text() != counted) == threads_run
        assert state_of(process) == state
    finally:
        process.kill()
        process.communicate()


def test_all_ranks_are_killed_at_once(tmp_path):
    others = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    for rank, process in enumerate(others, 1):
        (tmp_path / f"rank {rank}").write_text(str(process.pid))
    process = started(tmp_path, "all killed")
    process.communicate(timeout=60)
    assert [each.wait(60) for each in (process, *others)] == [-signal.SIGKILL] * 3


@pytest.mark.parametrize("harm", DAMAGES)
def test_a_corrupt_checkpoint_is_the_newest_and_does_not_load(harm, tmp_path):
    for tag in ("global_step3", "global_step4"):
        write_whole(tmp_path / tag, example())
        write_latest(tmp_path, tag)
    assert damage(tmp_path, harm) == "global_step4"
    verify(tmp_path / "global_step3")
    with pytest.raises(CheckpointError):
        verify(tmp_path / "global_step4")


def test_every_fault_of_a_process_is_known_to_the_script(tmp_path, monkeypatch):
    from testing.scripts.meets_chaos import Trained

    monkeypatch.setenv("RANK", "0")
    assert Trained({"folder": str(tmp_path)}).faults.keys() == FAULTS.keys() - {"corrupt checkpoint", "failing save"}


def state_of(process):
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][:1]


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
