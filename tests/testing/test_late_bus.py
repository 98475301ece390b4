"""The late bus names what a GPU's copies would not forgive."""

import pytest
import torch

from ds_lgamp.partition.bus import Bus
from testing.late_bus import late_copies
from testing.simnccl import Fault

CPU = torch.device("cpu")


@pytest.fixture
def bus():
    with late_copies():
        yield Bus(CPU)


def test_a_load_arrives_when_the_program_waits(bus):
    target = torch.zeros(3)
    load = bus.load(target, torch.ones(3))
    load._issued.wait()
    assert target.isnan().all()
    load.wait()
    assert torch.equal(target, torch.ones(3))


def test_a_load_takes_what_the_update_ahead_of_it_has_made(bus):
    target, source = torch.zeros(3), torch.ones(3)
    bus.load(target, source, after=lambda: source.fill_(2)).wait()
    assert target.sum() == 6


def test_the_host_sees_what_is_stored_when_it_has_waited_for_the_end(bus):
    home = torch.zeros(3)
    store = bus.store(home, torch.ones(3))
    store.wait()
    assert home.isnan().all()
    store.done()
    assert torch.equal(home, torch.ones(3))


def test_a_load_finds_what_the_device_has_stored_before(bus):
    home, target = torch.zeros(3), torch.zeros(3)
    store = bus.store(home, torch.ones(3))
    store.wait()
    bus.load(target, home).wait()
    assert torch.equal(target, torch.ones(3))


@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize("end, harm", [("source", "written"), ("target", "written"), ("source", "freed")])
def test_memory_of_a_copy_under_way_is_left_alone(bus, direction, end, harm):
    tensors = {"target": torch.zeros(3), "source": torch.ones(3)}
    copy = getattr(bus, direction)(tensors["target"], tensors["source"])
    copy._issued.wait()
    if harm == "written":
        tensors[end][0] = 7
    else:
        tensors[end].untyped_storage().resize_(0)
    with pytest.raises(Fault, match=rf"a {direction} was under way when its {end} \[3\] float32 was {harm}"):
        copy.wait()


def test_what_the_host_writes_ahead_of_the_end_of_a_store_is_lost(bus):
    home = torch.zeros(3)
    store = bus.store(home, torch.ones(3))
    store.wait()
    home.fill_(7)
    with pytest.raises(Fault, match="its target"):
        store.done()
