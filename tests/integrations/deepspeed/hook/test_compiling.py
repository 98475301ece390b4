"""Warnings for jobs that wait for a compilation that nobody runs."""

import inspect
import os
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest
from torch.utils.file_baton import FileBaton

from ds_lgamp.integrations.deepspeed.hook import initialize
from testing import SCRIPTS
from testing.launching import ON_CPU


@pytest.fixture
def wait_for(tmp_path, monkeypatch):
    """Returns a function that starts to wait for a lock, as torch does while another process compiles. It returns the
    lock's file."""
    monkeypatch.setattr(initialize, "_LOOKS_EVERY", 0.05)
    # Unwraps the function, because another test of this process may have installed ds_lgamp.
    monkeypatch.setattr(FileBaton, "wait", inspect.unwrap(FileBaton.wait))
    lock = tmp_path / "lock"
    lock.touch()
    waiting = threading.Thread(target=lambda: FileBaton(str(lock), 0.01).wait())
    with ExitStack() as undo:
        initialize.name_forgotten_locks(undo)

        def start():
            waiting.start()
            return lock

        yield start
        lock.unlink(missing_ok=True)
        waiting.join(10)
        assert not waiting.is_alive()


def named(caplog):
    return [record.getMessage() for record in caplog.records if record.name == initialize.__name__]


def soon(condition):
    pause = threading.Event()
    return any(condition() or pause.wait(0.05) for _ in range(200))


def test_a_forgotten_lock_is_named_once_with_the_file_to_remove(wait_for, caplog):
    lock = wait_for()
    assert soon(lambda: named(caplog))
    threading.Event().wait(0.3)
    (message,) = named(caplog)
    assert message.startswith(f"ds_lgamp: DeepSpeed waits for the lock {lock}, ")
    assert message.endswith(f"remove the file: rm {lock}")


def test_the_lock_of_a_process_that_compiles_is_not_named_until_that_ends(wait_for, caplog, tmp_path):
    with (tmp_path / "lock").open():
        lock = wait_for()
        threading.Event().wait(0.5)
        assert not named(caplog)
    assert soon(lambda: named(caplog)) and str(lock) in named(caplog)[0]


def test_one_rank_of_a_machine_speaks_for_all(wait_for, caplog, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    wait_for()
    threading.Event().wait(0.5)
    assert not named(caplog)


def test_afterwards_torch_waits_as_ever():
    stock = FileBaton.wait
    with ExitStack() as undo:
        initialize.name_forgotten_locks(undo)
        assert FileBaton.wait is not stock
    assert FileBaton.wait is stock


def test_locks_are_named_within_20_seconds():
    assert initialize._LOOKS_EVERY < 20


SCRIPT = str(SCRIPTS / "only_initialises.py")


@pytest.fixture
def start_beside_a_lock(tmp_path):
    """Returns a function that starts Python beside the lock of a killed compilation, and the lock."""
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    environment = {**os.environ, **ON_CPU, **place, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    started = []

    def start(*words):
        command = [sys.executable, *words]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, env=environment, **output))
        return started[-1]

    yield start, lock
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_script_that_installs_hears_of_a_forgotten_lock(start_beside_a_lock):
    start, lock = start_beside_a_lock
    lines = []
    for line in start(SCRIPT, "--install").stdout:
        lines.append(line)
        if line.endswith(f"remove the file: rm {lock}\n"):
            return
    # Without a compiler DeepSpeed does not compile, and does not wait.
    assert "INITIALISED\n" in lines, lines


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--measure", os.devnull], ["--explain"]])
def test_a_script_that_is_run_compiles_nothing_and_waits_for_no_lock(options, start_beside_a_lock):
    start, lock = start_beside_a_lock
    output, _ = start("-m", "ds_lgamp", "run", *options, SCRIPT).communicate(timeout=240)
    assert "INITIALISED\n" in output, output
    assert [*lock.parent.iterdir()] == [lock]
