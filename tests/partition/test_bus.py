"""The bus copies beside the caller: one transfer after the other in a direction, both directions at once. What lies on
the disk crosses it through a few buffers."""

import gc
import os
import threading
import time
import weakref
from contextlib import contextmanager
from threading import current_thread
from types import SimpleNamespace

import pytest
import torch

from ds_lgamp.cost.offload import room
from ds_lgamp.partition import bus as bus_module
from ds_lgamp.partition import disk as disks
from ds_lgamp.partition.bus import Bus, Transfer, use_device
from ds_lgamp.partition.disk import Disk
from ds_lgamp.schedule.spec import DISK_BLOCK

CPU = torch.device("cpu")
SECONDS = 10
"""The longest a test waits for a thread."""


def bus_threads():
    return [thread for thread in threading.enumerate() if thread.name == "ds_lgamp bus"]


def test_what_was_loaded_and_stored_arrives_and_is_counted():
    bus = Bus(CPU)
    host = bus.room.empty(1000, torch.bfloat16).copy_(torch.arange(1000))
    device = torch.zeros(1000, dtype=torch.bfloat16)
    bus.load(device, host).wait()
    assert torch.equal(device, host)
    gradient = torch.randn(500)
    stored = bus.room.empty(500, torch.float32)
    bus.store(stored, gradient).done()
    assert torch.equal(stored, gradient)
    assert (bus.bytes_loaded, bus.bytes_stored) == (2 * 1000, 4 * 500)


def test_a_load_begins_when_its_source_is_final_and_the_caller_goes_on():
    bus, updated = Bus(CPU), threading.Event()
    source, target = torch.zeros(4), torch.zeros(4)
    transfer = bus.load(target, source, after=lambda: updated.wait(SECONDS))
    source.fill_(1)
    assert target.sum() == 0
    updated.set()
    transfer.wait()
    assert target.sum() == 4


def test_loads_keep_their_order_and_stores_do_not_wait_for_them():
    bus, go, order = Bus(CPU), threading.Event(), []
    first = bus.load(torch.zeros(1), torch.ones(1), after=lambda: go.wait(SECONDS))
    second = bus.load(torch.zeros(1), torch.ones(1), after=lambda: order.append(first._issued.is_set()))
    bus.store(torch.zeros(1), torch.ones(1)).done()
    assert order == []
    go.set()
    second.wait()
    assert order == [True]


def test_a_throttled_direction_takes_the_time_of_its_bytes():
    bus = Bus(CPU, bytes_per_second=1e6)
    tensors = [torch.zeros(10_000) for _ in range(4)]
    start = time.perf_counter()
    for transfer in [bus.load(tensors[0], tensors[1]) for _ in range(2)]:
        transfer.wait()
    # Two loads of 40 kB, one behind the other.
    assert time.perf_counter() - start >= 0.08
    start = time.perf_counter()
    bus.store(tensors[2], tensors[3]).wait()
    assert time.perf_counter() - start >= 0.04


def test_an_error_in_the_thread_is_raised_by_the_wait_and_later_copies_go_on():
    bus = Bus(CPU)

    def fails():
        raise RuntimeError("the update failed")

    failed = bus.load(torch.zeros(1), torch.ones(1), after=fails)
    target = torch.zeros(1)
    later = bus.load(target, torch.ones(1))
    for ending in (failed.wait, failed.done):
        with pytest.raises(RuntimeError, match="the update failed"):
            ending()
    later.wait()
    assert target.item() == 1


def test_a_parameter_that_requires_a_gradient_can_be_loaded():
    parameter = torch.nn.Parameter(torch.zeros(3))
    Bus(CPU).load(parameter, torch.ones(3)).wait()
    assert parameter.sum() == 3 and parameter.grad_fn is None


def test_the_bus_keeps_no_tensor_whose_copy_is_over():
    bus = Bus(CPU)
    target, source = torch.zeros(3), torch.ones(3)
    gone = [weakref.ref(target), weakref.ref(source)]
    transfer = bus.load(target, source)
    transfer.wait()
    del target, source
    assert [reference() for reference in gone] == [None, None]


def test_what_cannot_be_copied_as_it_is_is_refused():
    bus = Bus(CPU)
    with pytest.raises(ValueError, match="one shape and dtype"):
        bus.load(torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="one shape and dtype"):
        bus.store(torch.zeros(3), torch.zeros(4))
    assert (bus.bytes_loaded, bus.bytes_stored) == (0, 0)


@pytest.mark.parametrize("device, speed", [("cpu", 0.0), ("cpu", -1.0), ("cuda", 1e9)])
def test_a_speed_that_the_bus_cannot_have_is_refused(device, speed):
    with pytest.raises(ValueError, match="bytes_per_second"):
        Bus(torch.device(device), speed)


def test_the_thread_ends_with_the_bus():
    before = bus_threads()
    bus = Bus(CPU)
    bus.load(torch.zeros(1), torch.ones(1)).wait()
    (thread,) = (each for each in bus_threads() if each not in before)
    del bus
    gc.collect()
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_the_thread_works_on_the_device_of_the_bus(monkeypatch):
    """A new thread begins with the node's first device, and would take memory there."""
    chosen = []
    monkeypatch.setattr(bus_module, "use_device", lambda device: chosen.append((current_thread().name, device)))
    bus = Bus(CPU)
    for _ in range(2):
        bus.load(torch.zeros(4), torch.ones(4)).wait()
    assert chosen == [("ds_lgamp bus", CPU)]


def test_a_thread_chooses_an_accelerator_and_no_cpu(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(set_device=chosen.append))
    use_device(CPU)
    use_device(torch.device("cuda", 3))
    assert chosen == [torch.device("cuda", 3)]


@pytest.mark.parametrize("fails", [False, True])
def test_a_recorded_copy_of_a_device_begins_and_ends_in_the_stream_that_copies(fails, monkeypatch):
    happened = []

    @contextmanager
    def inside(stream):
        happened.append(stream)
        yield
        happened.append("program")

    module = SimpleNamespace(stream=inside)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    stream = SimpleNamespace(wait_event=lambda event: happened.append(f"waits for {event}"))
    flight = SimpleNamespace(begin=lambda: happened.append("begin"), end=lambda: happened.append("end"))

    def copy(target, source, now):
        happened.append("copy")
        if fails:
            raise OSError("no bus")

    transfer = Transfer(torch.zeros(4), torch.ones(4), lambda: happened.append("after"), "now", flight)
    transfer._run(copy, stream)
    begins = ["after", stream, "waits for now", "begin", "program"]
    assert happened == [*begins, "copy", stream, "end", "program"]
    assert transfer._issued.is_set() and isinstance(transfer._error, OSError) == fails
    happened.clear()
    Transfer(torch.zeros(4), torch.ones(4), None, "now", None)._run(lambda *_: happened.append("copy"), stream)
    assert happened == ["copy"], "without a recording the program's events are enough"


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


def test_what_crosses_the_bus_goes_first_on_the_disk(bus, monkeypatch):
    home, first = bus.disk.empty(2 * DISK_BLOCK, torch.uint8).fill_(1), []
    for threads in (bus.disk._readers, bus.disk._writers):
        start = threads.start
        monkeypatch.setattr(
            threads, "start", lambda piece, goes, start=start: (first.append(goes), start(piece, goes))[1]
        )
    bus.load(torch.zeros(2 * DISK_BLOCK, dtype=torch.uint8), home).wait()
    bus.store(home, torch.ones(2 * DISK_BLOCK, dtype=torch.uint8)).wait()
    assert len(first) >= 2 and all(first)


def test_an_error_of_the_disk_is_raised_by_the_wait_and_the_bus_goes_on(bus, monkeypatch):
    home, target = bus.disk.empty(50_000, torch.float32).fill_(1), torch.zeros(50_000)
    for name, start in (("preadv", lambda: bus.load(target, home)), ("pwritev", lambda: bus.store(home, target))):
        with monkeypatch.context() as broken:
            broken.setattr(os, name, lambda *_: 0)
            with pytest.raises(OSError, match="nvme_path is .*, where a file cannot be"):
                start().wait()
        start().wait()
    assert target.unique().tolist() == home.unique().tolist() == [1]
