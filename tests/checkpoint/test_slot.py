"""The files of a live state: what is in them, who removes them, and who may."""

import logging
import subprocess
import sys

import pytest
import torch

from ds_lgamp.checkpoint.errors import CheckpointError
from ds_lgamp.checkpoint.live_states import publish_alone
from ds_lgamp.checkpoint.slot import Slot, is_written
from testing import ROOT

HOLDS = """
import sys, time
from pathlib import Path
from ds_lgamp.checkpoint.slot import Slot
slot = Slot(Path(sys.argv[1]) / "live-0badcafe" / "0-0")
slot.open()
print("open", flush=True)
time.sleep(600)
"""


def fill(slot, value):
    """Writes a blob of four numbers. Returns its place in the file."""
    numbers = torch.full((4,), float(value))
    return slot.write("key", numbers.dtype, 16, [memoryview(numbers.numpy())], [])["position"]


def numbers_in(path):
    return torch.from_file(str(path), size=4).tolist()


def test_a_slot_whose_file_was_removed_begins_anew(tmp_path):
    slot, data = Slot(tmp_path / "live-0badcafe" / "0-0"), tmp_path / "live-0badcafe" / "0-0.bin"
    slot.open()
    assert fill(slot, 1) == 0 and not slot.is_gone
    data.unlink()
    data.parent.rmdir()
    assert slot.is_gone
    slot.open()
    assert not slot.is_gone
    assert fill(slot, 2) == 0 and numbers_in(data) == [2.0] * 4
    slot.remove()
    assert not data.exists() and slot.is_gone


@pytest.fixture
def job(tmp_path):
    """Another process that has a slot open."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "open\n"
        yield process
        process.kill()


def test_a_slot_is_written_until_its_process_ends(job, tmp_path):
    assert is_written(tmp_path / "live-0badcafe")
    job.kill()
    job.wait()
    assert not is_written(tmp_path / "live-0badcafe")


def test_the_state_of_a_job_that_runs_is_not_published(job, tmp_path, caplog):
    (tmp_path / "live-0badcafe" / "0-0.json").write_text("half a header")
    with (
        caplog.at_level(logging.WARNING, "ds_lgamp"),
        pytest.raises(CheckpointError, match="has no whole live state"),
    ):
        publish_alone(tmp_path, lambda tag: tmp_path / tag)
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / 'live-0badcafe'} belongs to a job that runs, and is left alone"
    ]
