"""What lies on the disk crosses the bus through a few buffers, whatever its size."""

import os
import threading

import pytest
import torch

from ds_lgamp.cost.disk import room
from ds_lgamp.partition import disk as disks
from ds_lgamp.partition.bus import Bus
from ds_lgamp.partition.disk import Disk
from ds_lgamp.schedule.offload import DISK_BLOCK

CPU = torch.device("cpu")


@pytest.fixture
def bus(tmp_path, monkeypatch):
    monkeypatch.setattr(disks, "PIECE", DISK_BLOCK)
    return Bus(CPU, disk=Disk(tmp_path))


@pytest.mark.parametrize("elements", [0, 1, 1024, 50_000])
def test_tensors_go_to_the_disk_and_back(bus, elements):
    home = bus.disk.empty(elements, torch.float32)
    values = torch.arange(elements).float()
    bus.store(home, values).wait()
    assert torch.equal(home, values)
    target = torch.zeros(elements)
    bus.load(target, home).wait()
    assert torch.equal(target, values)
    assert bus.bytes_loaded == bus.bytes_stored == values.nbytes
    blocks = room(values.nbytes)
    assert (bus.disk.bytes_read, bus.disk.bytes_written) == (blocks, blocks)


def test_what_lies_in_memory_does_not_touch_the_disk(bus):
    home = bus.room.empty(100, torch.float32)
    bus.store(home, torch.ones(100)).wait()
    bus.load(torch.zeros(100), home).wait()
    assert bus.disk.bytes_written == bus.disk.bytes_read == 0


def test_buffers_are_taken_once_by_each_direction(bus):
    home = bus.disk.empty(200_000, torch.float32)
    copies = bus._loads._copy.__self__, bus._stores._copy.__self__
    assert [copy._memory for copy in copies] == [None, None]
    for _ in range(2):
        bus.store(home, torch.ones(200_000)).wait()
        bus.load(torch.zeros(200_000), home).wait()
    assert [copy._memory.nbytes for copy in copies] == [disks.PIECES * DISK_BLOCK] * 2


def test_the_disk_reads_pieces_while_another_crosses_the_bus(bus, monkeypatch):
    home = bus.disk.empty(8 * DISK_BLOCK, torch.uint8).fill_(1)
    reads, read = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: reads.append(1) or read(*arguments))
    first, go = threading.Event(), threading.Event()
    loads = bus._loads._copy.__self__
    plain = loads.copy

    def held(*arguments):
        first.set()
        assert go.wait(30)
        return plain(*arguments)

    loads.copy = held
    load = bus.load(torch.zeros(8 * DISK_BLOCK, dtype=torch.uint8), home)
    assert first.wait(30)
    deadline = threading.Event()
    while len(reads) < disks.PIECES and not deadline.wait(0.01):
        pass
    assert len(reads) == disks.PIECES
    go.set()
    load.wait()
    assert len(reads) == 8


def test_an_error_of_the_disk_is_raised_by_the_wait_and_the_bus_goes_on(bus, monkeypatch):
    home, target = bus.disk.empty(50_000, torch.float32).fill_(1), torch.zeros(50_000)
    for name, start in (("preadv", lambda: bus.load(target, home)), ("pwritev", lambda: bus.store(home, target))):
        with monkeypatch.context() as broken:
            broken.setattr(os, name, lambda *_: 0)
            with pytest.raises(OSError, match="nvme_path is .*, where a file cannot be"):
                start().wait()
        start().wait()
    assert target.unique().tolist() == home.unique().tolist() == [1]
