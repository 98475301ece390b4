"""Ranks of one machine share the memory in which the host has what all of them have whole."""

import os
import time
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.partition import memory
from ds_lgamp.partition.bus import Bus
from ds_lgamp.partition.host import Host, HostThread, LoadedPart
from ds_lgamp.partition.memory import common_copy
from ds_lgamp.partition.policy import UnitParameter, ZeroPolicy
from ds_lgamp.partition.unit import Observer, Unit
from testing.ranks import run_on_ranks

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.uint8]


def write_and_read():
    """Returns what each of two ranks reads in the memory that they share after the other has written."""
    found = []
    for dtype, size in product(DTYPES, (1, 1000)):
        values = torch.arange(size).to(dtype)
        common = common_copy(values, dist.group.WORLD)
        assert common is not None
        copy, sharers = common
        assert torch.equal(copy, values) and copy.dtype == dtype and copy.data_ptr() != values.data_ptr()
        dist.barrier()
        if dist.get_rank() == 1:
            copy.fill_(7)
        dist.barrier()
        found.append((sharers, bool((copy == 7).all())))
    return found


def test_what_one_rank_writes_the_other_reads():
    assert run_on_ranks(2, write_and_read) == [[(2, True)] * 2 * len(DTYPES)] * 2


def parts_of(machine=None, opens=True):
    """Returns how many ranks share the home of a part, and its values, on a rank whose ``machine`` has another name, or
    that cannot open what others have created."""

    def refuse(*_, **__):
        raise OSError("no such process")

    with pytest.MonkeyPatch.context() as patch:
        if machine is not None:
            patch.setattr(memory, "machine", lambda: machine)
        if not opens:
            patch.setattr(torch, "from_file", refuse)
        host = Host(Bus(CPU), HostThread(CPU), parameters=True)
        part = LoadedPart(host, torch.arange(10.0), dist.group.WORLD)
    part.settle()
    return part.shared_by, part.home.tolist()


def on_machines(names):
    return parts_of(names[dist.get_rank()])


def unless_last_opens():
    return parts_of(opens=dist.get_rank() < dist.get_world_size() - 1)


@pytest.mark.parametrize(
    ("run", "sharers"),
    [
        (partial(on_machines, "aab"), [2, 2, 1]),
        (partial(on_machines, "aba"), [2, 1, 2]),
        (partial(on_machines, "abc"), [1, 1, 1]),
        (unless_last_opens, [1, 1, 1]),
    ],
)
def test_ranks_of_other_machines_and_those_that_cannot_share_have_memory_of_their_own(run, sharers):
    assert run_on_ranks(3, run) == [(number, torch.arange(10.0).tolist()) for number in sharers]


def beside_a_file(folder):
    """Returns how many ranks share a home if the second has a file of its own where the first says its memory is, as in
    two containers that number their processes alike, and what is left of the file."""
    path = folder / str(dist.get_rank())
    path.write_bytes(b"data" * 1000)
    with pytest.MonkeyPatch.context() as patch, path.open("r+b") as file:
        if dist.get_rank() == 0:
            patch.setattr(memory.os, "getpid", lambda: "self")
        descriptors = [os.dup(file.fileno()) for _ in range(100 * dist.get_rank())]
        shared = common_copy(torch.arange(10.0), dist.group.WORLD)
        for each in descriptors:
            os.close(each)
    return shared, path.read_bytes() == b"data" * 1000


def test_a_file_of_ones_own_is_not_taken_for_the_memory_of_another(tmp_path):
    assert run_on_ranks(2, beside_a_file, tmp_path) == [(None, True)] * 2


def without_a_function():
    """Returns how many ranks share a home if Python was built with an old C library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(os, "memfd_create")
        return common_copy(torch.arange(10.0), dist.group.WORLD)[1]


def test_ranks_share_memory_where_python_has_no_function_for_it():
    assert run_on_ranks(2, without_a_function) == [2, 2]


def seen():
    """Returns how often this process maps memory that ranks share, and how many descriptors of it are open."""
    with open("/proc/self/maps") as maps:
        mapped = sum("/memfd:ds_lgamp" in line for line in maps)
    with os.scandir("/proc/self/fd") as entries:
        # The scan has a descriptor of its own, which is gone.
        paths = [os.readlink(entry.path) for entry in entries if os.path.lexists(entry.path)]
    return mapped, sum("/memfd:ds_lgamp" in path for path in paths)


def share_and_drop():
    """Returns what is :func:`seen` beside three homes, and after them."""
    homes = [common_copy(torch.arange(10.0), dist.group.WORLD)[0] for _ in range(3)]
    beside = seen()
    homes.clear()
    return beside, seen()


def test_the_memory_is_mapped_as_long_as_the_home_lives_and_keeps_no_descriptor():
    assert run_on_ranks(2, share_and_drop) == [((3, 0), (0, 0))] * 2


def load_while_another_writes():
    """Returns what the slower of two ranks has loaded, and loads once more after both have written."""
    part = LoadedPart(Host(Bus(CPU), HostThread(CPU), parameters=True), torch.zeros(10), dist.group.WORLD)
    slow = dist.get_rank() == 1
    part.outdate()
    part.start(partial(time.sleep, 0.5) if slow else None)
    part.settle()
    before = part.part.clone()
    part.home.fill_(1)
    part.outdate()
    part.start(None)
    part.finish()
    return before.tolist(), part.part.tolist()


def test_nobody_writes_while_another_rank_loads():
    assert run_on_ranks(2, load_while_another_writes) == [([0.0] * 10, [1.0] * 10)] * 2


class Reader(Observer):
    """Reads the shard of a unit until it changes."""

    def __init__(self):
        self.found = None

    def before_change(self, unit):
        time.sleep(0.5 * dist.get_rank())
        self.found = unit.storage.shard.sum().item()


def read_while_another_writes(slices):
    """Returns what an observer has read before a frozen unit was changed, slowly on one of two ranks."""
    host = Host(Bus(CPU), HostThread(CPU), parameters=True)
    weight = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    policy = ZeroPolicy(dist.group.WORLD, 3, frozen_home=host)
    unit, reader = Unit("chunk 0 frozen", [UnitParameter("0.weight", weight, None)], policy), Reader()
    unit.observers.append(reader)
    new = torch.ones_like(unit.storage.shard)
    if slices:
        unit.replace_slice(slice(0, len(new)), new)
    else:
        unit.replace_shard(new)
    return unit.storage.loaded.shared_by, reader.found, unit.storage.shard.sum().item() > 0


@pytest.mark.parametrize("slices", [False, True])
def test_nobody_writes_while_another_rank_still_observes(slices):
    assert run_on_ranks(2, read_while_another_writes, slices) == [(2, 0.0, True)] * 2
