"""What offloading leaves on the device, takes on the host and sends over the bus, calculated by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.cost.memory import rank_memory
from ds_lgamp.cost.offload import HostMemory, host_memory
from ds_lgamp.cost.traffic import BusBytes, bus_bytes
from ds_lgamp.cost.units import ElementBytes, Sharding, UnitSize
from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.program import build_program, build_rank_program
from ds_lgamp.schedule.spec import Offload, ProgramSpec

STATE, EVERYTHING = Offload(), Offload(parameters=True)
BF16 = ElementBytes(weights=2, gradients=2, optimizer=8, update=4)
FP32 = ElementBytes(optimizer=8)


def spec(offload, stage=3, chunks=3, micro_batches=2, group=None, updates="next_step", resident=2):
    defers = stage < 3
    placement = (0,) * chunks
    return ProgramSpec(
        placement,
        "layered",
        micro_batches,
        group or micro_batches,
        stage,
        resident,
        offload=offload,
        updates=updates,
        defers_gathers=defers,
    )


def units(chunks=3, elements=64):
    return [UnitSize(elements, elements, (chunk,)) for chunk in range(chunks)]


def memory_of(of, sizes, data_ranks, element):
    actions = build_rank_program(of, 0)
    return rank_memory(actions, sizes, Sharding(of.zero_stage, data_ranks), element, offload=of.offload)


@pytest.mark.parametrize("updates", ["reduction", "next_step"])
def test_a_device_has_two_resident_chunks_two_gradients_and_the_parts_on_their_way(updates):
    """Two ranks, chunks of 64 elements, parts of 32. Behind LOAD2, three parts are loaded and none is gathered."""
    told = memory_of(spec(EVERYTHING, updates=updates), units(), 2, BF16)
    assert (told.weights, told.master_weights, told.optimizer_state, told.update) == (0, 0, 0, 0)
    assert told.loaded_weights == 3 * 2 * 32
    assert told.resident_weights == 2 * 2 * 64
    assert told.gradients == 2 * 4 * 32, "one is stored while the next one ends its reduction"
    assert told.gradient_buffers == 2 * 2 * 64 + 2 * 32 + 4 * 32
    backward = told.resident_weights + told.gradient_buffers + told.gradients
    assert told.peak <= told.loaded_weights + backward


def test_of_many_chunks_a_device_needs_no_more():
    few, many = (memory_of(spec(EVERYTHING, chunks=chunks), units(chunks), 2, BF16) for chunks in (6, 60))
    assert few.peak == many.peak
    assert many.host.peak == 10 * few.host.peak - 9 * few.host.update


@pytest.mark.parametrize(("stage", "elements"), [(1, 64), (2, 64), (3, 32)])
def test_without_parameters_on_the_host_weights_stay_as_they_are(stage, elements):
    told = memory_of(spec(STATE, stage), units(), 2, BF16)
    assert told.weights == 3 * 2 * elements and told.loaded_weights == 0
    assert told.resident_weights == (2 * 2 * 64 if stage == 3 else 0)
    assert told.gradients == 2 * 4 * 32 and told.master_weights == 0


@pytest.mark.parametrize("offload", [STATE, EVERYTHING])
def test_a_host_has_masters_state_and_gradients_and_weights_of_16_bits(offload):
    told = memory_of(spec(offload), units(), 2, BF16).host
    assert told == HostMemory(
        weights=3 * 2 * 32,
        master_weights=3 * 4 * 32,
        optimizer_state=3 * 8 * 32,
        gradients=3 * 4 * 32,
        update=4 * 32,
        peak=3 * 32 * (2 + 4 + 8 + 4) + 4 * 32,
    )
    assert memory_of(spec(offload), units(), 2, FP32).host.weights == 0, "loads copy from the master weights"


def test_what_is_unknown_of_an_optimizer_is_left_out():
    told = memory_of(spec(EVERYTHING), units(), 2, replace(BF16, optimizer=None, update=None)).host
    assert told.optimizer_state is None and told.update is None and told.peak == 3 * 32 * (2 + 4 + 4)


def test_an_optimizer_that_steps_on_all_units_together_takes_what_it_says():
    told = host_memory(units(), EVERYTHING, Sharding(3, 2), BF16, step=7)
    assert told.update == 7 and told.peak == 3 * 32 * (2 + 4 + 8 + 4) + 7


def test_one_rank_has_full_weights_from_load_to_release():
    """LOAD2 begins while chunks 0 and 1 are resident."""
    told = memory_of(spec(EVERYTHING), units(), 1, BF16)
    assert (told.weights, told.loaded_weights, told.resident_weights) == (0, 0, 3 * 2 * 64)
    # Chunk 2 becomes 4 bytes wide to travel, while chunk 1 accumulates in 2.
    assert told.gradients == (2 + 4) * 64 + 2 * 64 and told.gradient_buffers == 0
    assert memory_of(spec(STATE), units(), 1, BF16).weights == 3 * 2 * 64


def test_frozen_units_travel_with_parameters_only_and_have_no_master():
    sizes = [*units(2), UnitSize(64, 0, (1,), frozen=True)]
    state, everything = (memory_of(spec(offload, chunks=2), sizes, 2, BF16) for offload in (STATE, EVERYTHING))
    assert state.weights == 3 * 2 * 32 and everything.weights == 0
    assert everything.host.weights == state.host.weights + 2 * 32
    assert everything.host.master_weights == state.host.master_weights == 2 * 4 * 32


def test_a_tied_unit_is_loaded_with_the_user_that_needs_it_and_stored_by_the_step():
    tied = UnitSize(64, 64, (0, 2), tied=True, copies=2)
    told = memory_of(spec(EVERYTHING), [tied], 2, BF16)
    assert told.loaded_weights == 2 * 32 and told.gradients == 4 * 32 and told.tied_copies == 2 * 4 * 32
    moved = bus_bytes(build_program(spec(EVERYTHING))[0], [tied], EVERYTHING, Sharding(3, 2), BF16)
    # Chunk 0 brings it and lets it go, chunk 2 does so too, and chunk 0 needs it again.
    assert moved == BusBytes(loaded=3 * 2 * 32, stored=4 * 32)


@given(st.integers(1, 8), st.integers(1, 6), st.sampled_from([1, 2, 4]))
def test_bytes_over_the_bus_do_not_depend_on_micro_batches(chunks, resident, data_ranks):
    """Weights once per gather: 2N - B of N chunks, or once in all; gradients once."""
    part = 128 // data_ranks
    for micro_batches in (1, 4, 16):
        for offload in (STATE, EVERYTHING):
            of = spec(offload, chunks=chunks, micro_batches=micro_batches, resident=resident)
            moved = bus_bytes(build_program(of)[0], units(chunks, 128), offload, Sharding(3, data_ranks), BF16)
            loads = 2 * chunks - min(resident, chunks) if offload.parameters else chunks
            assert moved == BusBytes(2 * part * loads, 4 * part * chunks)


def test_groups_load_again_and_store_once():
    of = spec(EVERYTHING, chunks=4, micro_batches=4, group=2)
    (actions,) = build_program(of)
    moved = bus_bytes(actions, units(4), EVERYTHING, Sharding(3, 2), BF16)
    loads = sum(action.kind is Kind.LOAD for action in actions)
    assert moved == BusBytes(2 * 32 * loads, 4 * 4 * 32) and loads == 2 * (2 * 4 - 4) + 2


def test_an_evaluation_moves_parameters_only():
    for offload, loaded in ((STATE, 0), (EVERYTHING, 3 * 2 * 32)):
        actions = build_rank_program(spec(offload).evaluation(), 0)
        assert bus_bytes(actions, units(), offload, Sharding(3, 2), BF16) == BusBytes(loaded, 0)
