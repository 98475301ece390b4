"""The formulas of offloading tell what a real partition takes on the device and on the host, and moves between them."""

from functools import partial
from itertools import product

import pytest
import torch

from ds_lgamp.cost.memory import rank_memory
from ds_lgamp.cost.traffic import bus_bytes
from ds_lgamp.cost.units import Sharding
from ds_lgamp.optimizers.updates import postpone, start_postponed
from ds_lgamp.partition.bus import Bus
from ds_lgamp.partition.host import Host, HostThread
from ds_lgamp.partition.memory import HostRoom
from ds_lgamp.partition.policy import ZeroPolicy
from ds_lgamp.runtime.measure import PeakMemory, storage_of
from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import Offload
from tests.integrations.deepspeed.explain.imagined_rank import (
    CASES,
    SIZES,
    element_of,
    imagined_group,
    partition_of,
    sizes_of_experts,
    spec_of,
)
from tests.slow import slow_except

__all__ = ["imagined_group"]
DTYPES = [
    (torch.float32, None, None, True),
    (torch.bfloat16, torch.float32, None, True),
    (torch.float16, torch.float32, torch.float16, True),
    (torch.bfloat16, torch.float32, None, False),
]
"""Of weights, of gradients that add up and of those that travel; and whether the optimizer updates copies in fp32."""
KEPT = [(1, False), (2, False), (3, False), (3, True), (3, False, (0, 2)), (3, True, (0,))]
"""ZeRO stage, whether the host holds the parameters, and the chunks of which it holds nothing."""


class CountedRoom(HostRoom):
    def __init__(self):
        super().__init__(pinned=False)
        self.homes = []

    def empty(self, size, dtype):
        self.homes.append(super().empty(size, dtype))
        return self.homes[-1]


class CountedBus(Bus):
    """Knows which memory is the host's."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.room = CountedRoom()
        self.homes = self.room.homes


class DeviceMemory(PeakMemory):
    """Measures the memory of the device only."""

    def __init__(self, existing, bus):
        homes = {storage_of(home)._cdata for home in bus.homes}
        own = [tensor for tensor in existing if storage_of(tensor)._cdata not in homes]
        super().__init__(own)
        counts = self._counts
        self._counts = lambda tensor: counts(tensor) and storage_of(tensor)._cdata not in homes

    def look(self):
        """Notices what a transfer has taken: no operation of this thread reports it."""
        self.peak = max(self.peak, self.live())


@pytest.mark.parametrize("case", slow_except(["layered", "groups"], [*CASES]))
@pytest.mark.parametrize("updates", ["reduction", "next_step"])
def test_formulas_are_what_the_partition_takes_and_moves(case, updates, imagined_group):
    tie_group = imagined_group(2)
    for data_ranks in (1, 2, 3):
        data_group = imagined_group(data_ranks)
        for (stage, *offload), dtypes in product(KEPT, DTYPES):
            compare(CASES[case], updates, stage, Offload(*offload), data_group, tie_group, *dtypes)


@pytest.mark.parametrize("case", slow_except(["layered"], [*CASES]))
@pytest.mark.parametrize("updates", ["reduction", "next_step"])
def test_formulas_know_experts_that_ranks_divide(case, updates, imagined_group):
    """Two of four ranks have the same experts, and one of two."""
    tie_group = imagined_group(2)
    for data_ranks in (4, 2):
        data_group, sharing = imagined_group(data_ranks), imagined_group(data_ranks // 2)
        for (stage, *offload), dtypes in product(KEPT, DTYPES):
            compare(CASES[case], updates, stage, Offload(*offload), data_group, tie_group, *dtypes, sharing)


@pytest.mark.parametrize("case", slow_except(["groups"], [*CASES]))
@pytest.mark.parametrize("updates", slow_except(["next_step"], ["reduction", "next_step"]))
def test_formulas_know_gathered_weights_that_wait_on_the_host(case, updates, imagined_group):
    tie_group = imagined_group(2)
    for data_ranks, divided in ((3, False), (4, True), (2, True)):
        data_group = imagined_group(data_ranks)
        sharing = imagined_group(data_ranks // 2) if divided else None
        for (stage, *offload), dtypes in product([kept for kept in KEPT if kept[0] == 3], DTYPES):
            compare(CASES[case], updates, stage, Offload(*offload), data_group, tie_group, *dtypes, sharing, True)


def compare(
    case,
    updates,
    stage,
    offload,
    data_group,
    tie_group,
    dtype,
    gradient_dtype,
    communication_dtype,
    copies_weights,
    sharing=None,
    stores_weights=False,
):
    others = {"updates": updates, "offload": offload, "stores_weights": stores_weights}
    spec = spec_of(case, stage, defers_gathers=stage < 3, **others)
    actions, bus = build_program(spec)[0], CountedBus()
    host = Host(bus, HostThread(torch.device("cpu")), offload.parameters, on_device=offload.on_device)
    waits = bus if stores_weights else None
    policy = ZeroPolicy(data_group, stage, gradient_dtype, communication_dtype, host=host, bus=waits)
    policy = policy._replace(copies_weights=copies_weights)
    partition = partition_of(policy, dtype, tie_group, sharing)
    sizes = SIZES + ([] if sharing is None else sizes_of_experts(data_group.size() // sharing.size()))
    follow(partition, actions, updates)
    weights = [each for unit in partition.units for each in (unit.storage.flat, unit.storage.kept)]
    for unit in partition.units:
        if unit.policy.host is None and unit.trains and unit.reduction._gradient is not None:
            # One data-parallel rank keeps it for the next step.
            weights.append(unit.reduction._gradient)
        if unit.master.is_copy:
            (weights if unit.policy.host is None else bus.homes).append(unit.master.values)
    before = bus.bytes_loaded, bus.bytes_stored
    with DeviceMemory(weights, bus) as memory:
        follow(partition, actions, updates, memory.look)
    partition.catch_up()
    element = element_of(dtype, gradient_dtype, communication_dtype, copies_weights)
    sharding = Sharding(stage, data_group.size())
    formula = rank_memory(actions, sizes, sharding, element, offload=offload)
    label = (spec, data_group.size(), dtype, gradient_dtype, communication_dtype)
    assert formula.peak == memory.peak, label
    assert formula.host.peak == sum(home.nbytes for home in bus.homes), label
    moved = bus.bytes_loaded - before[0], bus.bytes_stored - before[1]
    assert moved == bus_bytes(actions, sizes, offload, sharding, element), label


def follow(partition, actions, updates, look=lambda: None):
    """Runs the partition's part of the actions."""
    run = {
        Kind.LOAD: partition.load,
        Kind.WAIT_LOAD: partition.wait_load,
        Kind.GATHER: partition.gather,
        Kind.WAIT_GATHER: partition.wait_gather,
        Kind.RELEASE: partition.release,
        Kind.BACKWARD: partition.begin_backward,
        Kind.REDUCE: partition.reduce,
        Kind.WAIT_REDUCE: partition.wait_reduce,
        Kind.STORE: partition.store,
        Kind.WAIT_STORE: partition.wait_store,
        Kind.STORE_WEIGHTS: partition.store_weights,
        Kind.WAIT_STORE_WEIGHTS: partition.wait_store_weights,
        Kind.LOAD_WEIGHTS: partition.gather,
        Kind.WAIT_LOAD_WEIGHTS: partition.wait_gather,
    }
    for action in actions:
        if action.kind in run:
            run[action.kind](action.chunk)
        elif action.kind is Kind.UPDATE:
            if updates == "reduction":
                leave_to_later(partition.finish_gradients_of(action.chunk))
            start_postponed(partition.chunk_units[action.chunk])
        elif action.kind is Kind.STEP:
            partition.finish_gradients()
            final = [unit for unit in partition.units if unit.reduction.is_final and unit.storage.pending is None]
            on_host = [unit for unit in final if unit.policy.host is not None]
            leave_to_later(on_host)
            if updates == "reduction":
                start_postponed(on_host)
            look()
            for unit in final:
                if unit.policy.host is None:
                    unit.follow_update()
                    unit.drop_gradient()
        look()


def leave_to_later(units):
    for unit in units:
        postpone(unit, partial(update, unit))


def update(unit):
    unit.settle_store()
    unit.round_weights()
    unit.drop_gradient()
