"""Tensors on the disk read and write like any others, also while buffers move past the page cache. Nothing is left
behind."""

import errno
import os
import time
from pathlib import Path
from threading import Event

import pytest
import torch

from ds_lgamp.cost.offload import room
from ds_lgamp.partition import disk as disks
from ds_lgamp.partition.disk import Disk, aligned
from ds_lgamp.schedule.spec import DISK_BLOCK
from testing.ranks import CONTEXT

SECONDS = 30
"""The longest a test waits for a process."""
MEMORY = Path("/dev/shm")
ELEMENTS = 3001


@pytest.fixture(params=["disk", "memory", "no O_DIRECT"])
def disk(request, tmp_path, monkeypatch):
    """A disk in the folder of temporary files, in a file system in memory, and in one that refuses ``O_DIRECT``."""
    if request.param == "no O_DIRECT":
        monkeypatch.setattr(os, "open", without_direct(os.open))
    elif request.param == "memory" and not MEMORY.is_dir():
        pytest.skip("there is no file system in memory")
    return Disk(MEMORY if request.param == "memory" else tmp_path)


def without_direct(plain):
    def opened(name, flags, *mode, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return plain(name, flags, *mode, **options)

    return opened


def moved(disk, home):
    """Reads ``home`` past its mapped memory."""
    memory = aligned(room(home.nbytes))
    disk.read(home, memory).wait()
    return memory[: home.nbytes].view(home.dtype)


def write(disk, home, values):
    memory = aligned(room(home.nbytes))
    memory[: home.nbytes].view(home.dtype).copy_(values)
    disk.write(home, memory).wait()


def test_mapped_and_direct_values_follow_one_another(disk, monkeypatch):
    # Of several pieces, the last of which is short.
    monkeypatch.setattr(disks, "PIECE", 2 * DISK_BLOCK)
    homes = [disk.empty(ELEMENTS + number, torch.float32) for number in range(3)]
    for step in range(50):
        for number, home in enumerate(homes):
            values = torch.arange(home.numel()) + 100.0 * step + number
            home.copy_(values)
            assert torch.equal(moved(disk, home), values)
            write(disk, home, values + 1)
            assert torch.equal(home, values + 1)
            # A page that the process has just written, and one that it has just read.
            home[7] = -1.0
            assert moved(disk, home)[7] == -1 and torch.equal(moved(disk, home)[8:], values[8:] + 1)


def test_bytes_are_counted_by_blocks(disk):
    home = disk.empty(ELEMENTS, torch.bfloat16)
    write(disk, home, torch.ones(ELEMENTS))
    moved(disk, home)
    assert (disk.bytes_read, disk.bytes_written, disk.bytes_taken) == (2 * DISK_BLOCK, 2 * DISK_BLOCK, 2 * DISK_BLOCK)
    home.fill_(2)
    assert disk.bytes_written == 2 * DISK_BLOCK, "what goes through the page cache counts as nothing"


def test_a_part_moves_alone(disk):
    home = disk.empty(4 * DISK_BLOCK, torch.uint8).fill_(1)
    memory = aligned(DISK_BLOCK).fill_(9)
    disk.write(home, memory, 2 * DISK_BLOCK).wait()
    assert home.view(4, -1).float().mean(1).tolist() == [1, 1, 9, 1]
    disk.read(home, memory, 3 * DISK_BLOCK).wait()
    assert memory.unique().tolist() == [1]


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no transparent huge pages"
)
def test_memory_asks_for_huge_pages():
    """hg among the flags of a mapping says so."""
    memory = aligned(4 << 20)
    assert memory.nbytes == 4 << 20 and memory.data_ptr() % DISK_BLOCK == 0
    here, flags = False, None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            begin, end = (int(each, 16) for each in first.split("-"))
            here = begin <= memory.data_ptr() < end
        elif here and first == "VmFlags:":
            flags = rest.split()
    assert flags is not None and "hg" in flags


@pytest.mark.parametrize("direction", ["read", "write"])
def test_what_crosses_the_bus_goes_before_what_updates_wait_for(tmp_path, monkeypatch, direction):
    """Its pieces go before those that wait, not before those that move."""
    monkeypatch.setattr(disks, "PIECE", DISK_BLOCK)
    monkeypatch.setattr(disks, "PIECES", 1)
    disk, order, begun, begin = Disk(tmp_path), [], Event(), Event()
    homes = [disk.empty(DISK_BLOCK * pieces, torch.uint8) for pieces in (3, 2)]
    of_update, of_bus = disk._offsets[homes[0]], disk._offsets[homes[1]]
    plain = disk._move

    def recorded(move, memory, start):
        begun.set()
        begin.wait(SECONDS)
        order.append(start)
        plain(move, memory, start)

    monkeypatch.setattr(disk, "_move", recorded)
    move = getattr(disk, direction)
    ahead = move(homes[0], aligned(3 * DISK_BLOCK))
    begun.wait(SECONDS)
    moving = [ahead, move(homes[1], aligned(2 * DISK_BLOCK), first=True)]
    begin.set()
    for each in moving:
        each.wait()
    assert order == [of_update, of_bus, of_bus + DISK_BLOCK, of_update + DISK_BLOCK, of_update + 2 * DISK_BLOCK]


def test_reads_do_not_wait_for_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(disks, "PIECES", 1)
    disk, begin = Disk(tmp_path), Event()
    home, plain = disk.empty(ELEMENTS, torch.float32), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *of: plain(*of) if begin.wait(SECONDS) else 0)
    writing = disk.write(home, aligned(room(home.nbytes)))
    disk.read(disk.empty(ELEMENTS, torch.float32), aligned(room(home.nbytes))).wait()
    assert not any(job.done() for job in writing._jobs)
    begin.set()
    writing.wait()


def test_only_whole_tensors_are_known(disk):
    home = disk.empty(ELEMENTS, torch.float32)
    assert disk.holds(home)
    assert not disk.holds(home[:]) and not disk.holds(home.clone()) and not disk.holds(torch.ones(1))


def test_the_space_of_a_tensor_is_used_again(disk):
    for _ in range(10):
        one, other = disk.empty(ELEMENTS, torch.float32), disk.empty(2 * ELEMENTS, torch.bfloat16)
        one.fill_(1), other.fill_(2)
        assert one.unique().tolist() == [1]
        del one, other
    assert disk.bytes_taken == 2 * room(4 * ELEMENTS)


def test_a_shorter_tensor_takes_the_smallest_space_that_is_free(disk):
    """As inputs of changing lengths do."""
    homes = [disk.empty(blocks * DISK_BLOCK, torch.uint8) for blocks in (6, 3, 4)]
    del homes
    taken = disk.bytes_taken
    for _ in range(3):
        one, other = disk.empty(3 * DISK_BLOCK, torch.uint8), disk.empty(2 * DISK_BLOCK, torch.uint8)
        one.fill_(1), other.fill_(2)
        assert one.unique().tolist() == [1]
        del one, other
    assert disk.bytes_taken == taken
    whole = disk.empty(6 * DISK_BLOCK, torch.uint8).fill_(3)
    assert disk.bytes_taken == taken and whole.unique().tolist() == [3]


def test_a_kernel_that_moves_portions_is_asked_again(disk, monkeypatch):
    for name in ("preadv", "pwritev"):
        move = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda file, buffers, offset, move=move: move(file, [memoryview(buffers[0])[:DISK_BLOCK]], offset)
        )
    home = disk.empty(ELEMENTS, torch.float32)
    write(disk, home, torch.arange(ELEMENTS))
    assert torch.equal(home, torch.arange(ELEMENTS).float()) and torch.equal(moved(disk, home), home)


def test_updates_leave_nothing_in_the_page_cache(tmp_path):
    """A direct write drops what readers have brought there, so the host's memory does not keep it."""
    disk = Disk(tmp_path)
    if disk._file.direct == disk._file.descriptor:
        pytest.skip("the file system of temporary files has no O_DIRECT")
    home = disk.empty(64 * DISK_BLOCK, torch.uint8).fill_(1)
    assert pages_in_memory(home) == 64
    write(disk, home, torch.ones(64 * DISK_BLOCK))
    assert pages_in_memory(home) == 0


def pages_in_memory(home):
    found = (disks.ctypes.c_ubyte * (home.nbytes // DISK_BLOCK))()
    address = disks.ctypes.c_void_p(home.data_ptr())
    assert disks._libc.mincore(address, disks.ctypes.c_size_t(home.nbytes), found) == 0
    return sum(page & 1 for page in found)


def test_the_space_returns_when_nobody_has_the_tensors(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    disk = Disk(tmp_path)
    homes = [disk.empty(ELEMENTS, torch.float32) for _ in range(20)]
    moved(disk, homes[3])
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) <= before + 2, "a tensor keeps no descriptor"
    del disk
    homes[0].fill_(3)
    assert homes[0].unique().tolist() == [3], "a tensor outlives the disk"
    del homes
    assert len(os.listdir("/proc/self/fd")) <= before


def hold(path, sender):
    home = Disk(path).empty(1 << 16, torch.float32).fill_(1)
    sender.send(home.numel())
    time.sleep(SECONDS)


def test_a_killed_run_leaves_nothing(tmp_path):
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=hold, args=(tmp_path, sender))
    process.start()
    try:
        assert receiver.poll(SECONDS) and receiver.recv() == 1 << 16
    finally:
        process.kill()
        process.join(SECONDS)
    assert os.listdir(tmp_path) == []


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nvme_path is '.*missing', which is no folder on this machine; create it"):
        Disk(tmp_path / "missing")


def test_a_path_where_no_file_can_be_made_is_refused():
    with pytest.raises(ValueError, match="a.nvme_path is '/proc', where this rank cannot make files .*; allow it"):
        Disk("/proc", "a.nvme_path")


def test_a_disk_with_too_little_space_is_refused_with_the_bytes(disk):
    disk.empty(ELEMENTS, torch.float32)
    with pytest.raises(ValueError, match=r"nvme_path is .* GB are free, but this rank needs .*e\+08 GB more than"):
        disk.empty(1 << 57, torch.float32)


@pytest.mark.parametrize("move, verb", [("preadv", "read"), ("pwritev", "written")])
def test_a_disk_that_fails_is_named(tmp_path, monkeypatch, move, verb):
    disk = Disk(tmp_path, "a.nvme_path")
    home = disk.empty(ELEMENTS, torch.float32)

    def fails(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, move, fails)
    with pytest.raises(OSError, match=f"a.nvme_path is .*, where a file cannot be {verb} .*; check the disk"):
        write(disk, home, torch.ones(ELEMENTS)) if verb == "written" else moved(disk, home)


def test_a_file_that_ends_early_is_an_error(tmp_path):
    disk = Disk(tmp_path)
    home = disk.empty(ELEMENTS, torch.float32)
    os.ftruncate(disk._file.descriptor, 0)
    with pytest.raises(OSError, match="cannot be read"):
        moved(disk, home)
