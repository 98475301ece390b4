"""A unit whose home is on the host is loaded for a gather, stored after its reduction, and updated by a thread of the
host. The group of ranks is imagined and its collectives move nothing."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_lgamp.optimizers.updates import postpone, start_postponed
from ds_lgamp.partition import host
from ds_lgamp.partition.bus import Bus
from ds_lgamp.partition.guard import NotGatheredError
from ds_lgamp.partition.host import Host, HostThread
from ds_lgamp.partition.policy import UnitParameter, ZeroPolicy
from ds_lgamp.partition.unit import Unit

ELEMENTS, SECONDS = 64, 10


@pytest.fixture(params=[1, 2], ids=["1 rank", "2 ranks"])
def data_group(request):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield dist.group.WORLD
    dist.destroy_process_group()


def unit_of(data_group, zero_stage=3, parameters=True, dtype=torch.float32, trains=True):
    host = Host(Bus(torch.device("cpu")), HostThread(torch.device("cpu")), parameters)
    weight = torch.nn.Parameter(torch.arange(ELEMENTS, dtype=dtype), requires_grad=trains)
    policy = ZeroPolicy(data_group, zero_stage, host=host)
    return Unit("chunk 0", [UnitParameter("0.weight", weight, 0)], policy), weight, host


def device_bytes(unit):
    """Returns the bytes that the device holds of the weights."""
    storages = {tensor.untyped_storage()._cdata: tensor for tensor in (unit.storage.flat, unit.storage.kept)}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def added(unit, amount=1.0):
    """Returns an update that adds to the master weights."""

    def update():
        unit.master.values.add_(amount)
        unit.round_weights()

    return update


def test_the_device_holds_weights_from_the_load_to_the_release(data_group):
    unit, weight, host = unit_of(data_group)
    unit.storage.release()
    held, part = [device_bytes(unit)], 4 * ELEMENTS // data_group.size()
    unit.storage.start_load()
    unit.storage.finish_load()
    held.append(device_bytes(unit))
    unit.storage.hold(0)
    unit.storage.finish_gather()
    held.append(device_bytes(unit))
    assert weight.numel() == ELEMENTS and weight[1] == 1
    unit.storage.drop(0)
    held.append(device_bytes(unit))
    assert held == [0, part, 4 * ELEMENTS, 0]
    assert host.bus.bytes_loaded == part


def test_a_gather_loads_what_nobody_has_loaded(data_group):
    unit, weight, host = unit_of(data_group)
    unit.storage.release()
    unit.storage.hold(0)
    unit.storage.finish_gather()
    assert weight[1] == 1 and host.bus.bytes_loaded == 4 * ELEMENTS // data_group.size()
    # The unit is complete and current, so another user needs nothing.
    unit.storage.start_load()
    unit.storage.hold(1)
    assert host.bus.bytes_loaded == 4 * ELEMENTS // data_group.size()


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_weights_that_stay_on_the_device_are_loaded_once_after_an_update(data_group, zero_stage):
    unit, weight, host = unit_of(data_group, zero_stage, parameters=False)
    for _ in range(2):
        unit.storage.release()
        unit.storage.start_load()
        unit.storage.hold(0)
        unit.storage.finish_gather()
    # The device had them from the beginning.
    assert host.bus.bytes_loaded == 0
    unit.storage.drop(0)
    postpone(unit, added(unit))
    start_postponed([unit])
    for _ in range(2):
        unit.storage.start_load()
        unit.storage.finish_load()
        unit.storage.hold(0)
        unit.storage.finish_gather()
        unit.storage.drop(0)
    assert host.bus.bytes_loaded == 4 * ELEMENTS // data_group.size()
    assert unit.storage.kept[0] == 1


def test_a_load_waits_for_the_update_and_the_program_does_not(data_group):
    unit, _, _ = unit_of(data_group)
    unit.storage.release()
    go = threading.Event()
    update = added(unit)

    def slow_update():
        assert go.wait(SECONDS)
        update()

    postpone(unit, slow_update)
    start_postponed([unit])
    unit.storage.start_load()
    assert unit.storage.pending is not None
    # Time for a load that does not wait.
    time.sleep(0.1)
    go.set()
    unit.storage.finish_load()
    assert unit.storage.kept[0] == 1


def test_an_update_that_fails_fails_the_load_and_all_later_updates(data_group):
    unit, _, host = unit_of(data_group)
    unit.storage.release()

    def fail():
        raise ValueError("no luck")

    postpone(unit, fail)
    unit.storage.start_load()
    with pytest.raises(ValueError, match="no luck"):
        unit.storage.finish_load()
    ran = []
    with pytest.raises(ValueError, match="no luck"):
        host.updates.start(lambda: ran.append(1)).wait()
    assert not ran


def test_parameters_are_old_while_the_host_updates_them(data_group):
    unit, weight, _ = unit_of(data_group, 2, parameters=False)
    postpone(unit, added(unit))
    start_postponed([unit])
    if data_group.size() == 1:
        # No other rank is needed to bring them.
        assert weight[0] == 1
        return
    with pytest.raises(NotGatheredError, match="0.weight has old values"):
        weight.sum()
    unit.storage.refresh()
    assert weight[0] == 1


@pytest.mark.parametrize("stores", [True, False], ids=["with a STORE", "without one"])
def test_a_stored_gradient_leaves_the_device(data_group, stores):
    unit, weight, host = unit_of(data_group, dtype=torch.bfloat16)
    unit.storage.hold(0)
    unit.storage.finish_gather()
    for _ in range(2):
        unit.reduction.begin_accumulation()
        weight.grad.add_(1)
        unit.reduction.start()
        unit.reduction.finish()
    if stores:
        unit.start_store()
        unit.finish_store()
    else:
        unit.finish_gradient()
    (segment,) = unit.master.segments
    assert segment.shard.grad.data_ptr() == unit.reduction.shard_gradient.data_ptr()
    assert segment.shard.grad.dtype == torch.float32 and unit.reduction._gradient is None
    assert host.bus.bytes_stored == 4 * ELEMENTS // data_group.size()
    unit.drop_gradient()
    assert segment.shard.grad is None


def test_master_weights_are_the_shard_of_the_host_or_its_fp32_copy(data_group):
    for dtype in (torch.float32, torch.bfloat16):
        unit, _, _ = unit_of(data_group, dtype=dtype)
        unit.replace_slice(slice(3, 5), torch.tensor([1.0, 2.0]))
        assert unit.storage.shard[3:5].tolist() == unit.master.values[3:5].tolist() == [1, 2]
        assert unit.master.is_copy == (dtype == torch.bfloat16)


def test_a_frozen_unit_is_on_the_host_only_with_the_parameters(data_group):
    assert unit_of(data_group, trains=False)[0].policy.host is not None
    assert unit_of(data_group, parameters=False, trains=False)[0].policy.host is None


def test_a_waiter_waits_for_the_write_and_the_next_job_does_not():
    thread, written, order = HostThread(torch.device("cpu")), threading.Event(), []

    def write():
        assert written.wait(SECONDS)
        order.append("written")

    first = thread.start(lambda: write)
    thread.start(lambda: order.append("next")).wait()
    waiting = threading.Thread(target=first.wait, daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive() and order == ["next"]
    written.set()
    waiting.join(SECONDS)
    assert not waiting.is_alive() and order == ["next", "written"]


def test_the_thread_does_not_wait_for_itself():
    """Its garbage collection may delete an engine, which waits for its jobs."""
    thread, queued, jobs = HostThread(torch.device("cpu")), threading.Event(), []
    jobs.append(thread.start(lambda: queued.wait(SECONDS) and jobs[1].wait()))
    jobs.append(thread.start(lambda: None))
    queued.set()
    waiting = threading.Thread(target=jobs[1].wait, daemon=True)
    waiting.start()
    waiting.join(SECONDS)
    assert not waiting.is_alive()


def test_an_error_of_the_write_is_raised_by_every_waiter():
    def write():
        raise OSError("full")

    job = HostThread(torch.device("cpu")).start(lambda: write)
    for _ in range(2):
        with pytest.raises(OSError, match="full"):
            job.wait()


def test_after_a_failed_job_no_other_one_runs():
    thread, ran = HostThread(torch.device("cpu")), []

    def fail():
        raise ValueError("no luck")

    jobs = [thread.start(fail), thread.start(lambda: ran.append(1))]
    for job in jobs:
        with pytest.raises(ValueError, match="no luck"):
            job.wait()
    assert not ran


def test_the_thread_has_the_device_of_its_rank(monkeypatch):
    """Otherwise its first event would make a context on the first device of the node."""
    made = []
    monkeypatch.setattr(host, "use_device", lambda device: made.append((device, threading.current_thread().name)))
    HostThread(torch.device("cuda", 3), "updates").start(lambda: None).wait()
    assert made == [(torch.device("cuda", 3), "updates")]


def test_only_the_thread_itself_computes_with_its_number_of_threads():
    """Neither the program nor threads that begin later do: the data of a script, for instance."""

    def numbers(thread):
        seen = []
        thread.start(lambda: seen.append(torch.get_num_threads())).wait()
        return seen[0]

    before = torch.get_num_threads()
    updating = HostThread(torch.device("cpu"), threads=before + 2)
    assert numbers(updating) == before + 2
    assert torch.get_num_threads() == before
    assert numbers(HostThread(torch.device("cpu"))) == before
    # A first computation does not take torch's number.
    updating.start(lambda: torch.ones(1_000_000).add_(1).zero_).wait()
    assert numbers(updating) == before + 2
