"""Units are read ahead of their updates and written behind them, through two buffers."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from ds_lgamp.optimizers.host_updates import Contents, UpdateBuffers
from ds_lgamp.partition.disk import Disk
from ds_lgamp.schedule.spec import DISK_BLOCK

SECONDS = 30
ELEMENTS = 1000


class Units:
    """Units of two tensors each, on a disk."""

    def __init__(self, path, count):
        self.disk = Disk(path)
        self.homes = [[self.disk.empty(ELEMENTS, torch.float32).fill_(unit) for _ in "ab"] for unit in range(count)]
        self.buffers = UpdateBuffers(self.disk, 2 * DISK_BLOCK)

    def announce(self, unit, read=slice(None)):
        self.buffers.announce(unit, Contents(self.homes[unit], self.homes[unit][read]))

    def update(self, unit):
        places = self.buffers.fetch(unit)
        for home in self.homes[unit]:
            places[id(home)].add_(100)
        return self.buffers.put(unit, self.homes[unit])


def test_units_are_read_and_written(tmp_path):
    units = Units(tmp_path, 5)
    for step in range(1, 4):
        for unit in range(5):
            units.announce(unit)
        for over in [units.update(unit) for unit in range(5)]:
            over()
        assert [[home.unique().tolist() for home in homes] for homes in units.homes] == [
            [[unit + 100 * step]] * 2 for unit in range(5)
        ]
    assert units.disk.bytes_read == units.disk.bytes_written == 3 * 5 * 2 * DISK_BLOCK


def test_what_others_write_between_updates_is_seen(tmp_path):
    units = Units(tmp_path, 1)
    for value in (5.0, 6.0):
        units.homes[0][0].fill_(value)
        units.announce(0)
        units.update(0)()
        assert units.homes[0][0].unique().tolist() == [value + 100]


def test_only_what_has_values_is_read_and_what_changed_is_written(tmp_path):
    units = Units(tmp_path, 1)
    units.announce(0, slice(1))
    places = units.buffers.fetch(0)
    assert places[id(units.homes[0][0])].unique().tolist() == [0] and len(places) == 2
    units.buffers.put(0, units.homes[0][1:])()
    assert (units.disk.bytes_read, units.disk.bytes_written) == (DISK_BLOCK, DISK_BLOCK)


def test_a_unit_is_written_behind_its_update_and_the_next_one_is_read_ahead(tmp_path, monkeypatch):
    units, go, write = Units(tmp_path, 3), threading.Event(), os.pwritev

    def held(*arguments):
        assert go.wait(SECONDS)
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", held)
    for unit in range(3):
        units.announce(unit)
    # Two units fit. The first one's write holds up neither its own caller nor the second update.
    over = units.update(0)
    places = units.buffers.fetch(1)
    assert places[id(units.homes[1][0])].unique().tolist() == [1]
    # The third unit takes the buffer of the first when that is written.
    waiting = threading.Thread(target=units.buffers.fetch, args=(2,), daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive() and units.homes[0][0].unique().tolist() == [0]
    go.set()
    over()
    waiting.join(SECONDS)
    assert not waiting.is_alive() and units.homes[0][0].unique().tolist() == [100]


def test_a_failed_write_is_raised_by_who_waits_and_by_the_next_read(tmp_path, monkeypatch):
    units = Units(tmp_path, 3)
    for unit in range(3):
        units.announce(unit)
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", lambda *_: 0)
        over = units.update(0)
        with pytest.raises(OSError, match="cannot be written"):
            over()
    units.update(1)()
    with pytest.raises(OSError, match="cannot be written"):
        units.buffers.fetch(2)


END = """
import atexit, sys
import torch
from tests.optimizers.test_host_updates import Units
units = Units(sys.argv[1], 2)
units.update_later = lambda: print([units.update(unit)() for unit in range(2)], units.homes[1][0][0].item())
for unit in range(2):
    units.announce(unit)
atexit.register(units.update_later)
"""


def test_updates_that_the_end_of_a_script_awaits_are_done(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", END, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=4 * SECONDS,
    )
    assert ended.stdout == "[None, None] 101.0\n", ended.stderr


def test_memory_is_taken_with_the_first_update(tmp_path):
    units = Units(tmp_path, 1)
    assert not units.buffers._free
    units.announce(0)
    units.update(0)()
    assert [buffer._memory.nbytes for buffer in units.buffers._free] == [2 * DISK_BLOCK] * 2
