"""The files of a live state: what is in them, who removes them, and who may."""

import logging
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from ds_lgamp.checkpoint import live_recovery, live_slot
from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.live_recovery import publish_alone
from ds_lgamp.checkpoint.live_slot import LiveSlot, is_written
from testing import ROOT

HOLDS = """
import sys, time
from pathlib import Path
from ds_lgamp.checkpoint.live_slot import LiveSlot
slot = LiveSlot(Path(sys.argv[1]) / "live-0badcafe" / "0-0")
slot.open()
print("open", flush=True)
time.sleep(600)
"""


def fill(written, value):
    """Writes a blob of four numbers. Returns its place in the file."""
    numbers = torch.full((4,), float(value))
    return written.write("key", numbers.dtype, 16, [memoryview(numbers.numpy())], [])["position"]


def numbers_in(path):
    return torch.from_file(str(path), size=4).tolist()


def test_a_slot_whose_file_was_removed_begins_anew(tmp_path):
    own, data = LiveSlot(tmp_path / "live-0badcafe" / "0-0"), tmp_path / "live-0badcafe" / "0-0.bin"
    own.open()
    assert fill(own, 1) == 0 and not own.is_gone
    data.unlink()
    data.parent.rmdir()
    assert own.is_gone
    own.open()
    assert not own.is_gone
    assert fill(own, 2) == 0 and numbers_in(data) == [2.0] * 4
    own.remove()
    assert not data.exists() and own.is_gone


@contextmanager
def holding(folder):
    """Inside the block, another process has a slot in ``folder`` open."""
    words = [sys.executable, "-c", HOLDS, str(folder)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "open\n"
        yield process
        process.kill()


@pytest.fixture
def job(tmp_path):
    with holding(tmp_path) as process:
        yield process


def test_a_slot_is_written_until_its_process_ends(job, tmp_path):
    assert is_written(tmp_path / "live-0badcafe")
    job.kill()
    job.wait()
    assert not is_written(tmp_path / "live-0badcafe")


def test_the_file_of_somebody_else_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "0-0.bin").write_text("")
    monkeypatch.setattr(live_slot, "open", refuse, raising=False)
    assert is_written(tmp_path)


def refuse(*_):
    raise PermissionError


def test_the_state_of_a_job_that_runs_is_not_published(job, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(live_recovery, "_PATIENCE", 0.1)
    (tmp_path / "live-0badcafe" / "0-0.json").write_text("half a header")
    with (
        caplog.at_level(logging.WARNING, "ds_lgamp"),
        pytest.raises(CheckpointError, match="has live states of a job that runs; end it first"),
    ):
        publish_alone(tmp_path, lambda tag: tmp_path / tag)
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / 'live-0badcafe'} belongs to a job that runs, and is left alone"
    ]
