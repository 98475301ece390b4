"""Programs whose computes wait for other ranks, because these have some of the experts, end on devices whose streams
share hardware queues."""

import zlib
from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import DeadlockError
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.validate import run_in_one_queue
from tests.schedule.queues import Device, Launch, Operation, copies_of, finishes, launched, one_queue, own_queues
from tests.schedule.strategies import program_specs

QUEUES = (1, 8, 32)
"""How many queues a device has: what Megatron-LM asks for, the default, and the most."""
TOKENS = st.sampled_from(["tokens", "compute"])
"""The stream of all-to-alls: its communicator's, or that of computes, as newer releases of torch have it."""


@st.composite
def expert_programs(draw, max_ranks: int = 4) -> tuple[ProgramSpec, int, int]:
    """Draws a spec, among how many ranks each experts are divided, and how many data-parallel ranks there are."""
    ranks = draw(st.sampled_from([count for count in (1, 2, 4) if count <= max_ranks]))
    strategy = program_specs(max_ranks=ranks, max_chunks_per_rank=3, max_micro_batches=5)
    spec = draw(strategy.filter(lambda spec: spec.pipeline_ranks == ranks))
    expert_ranks = draw(st.sampled_from([1, 2, 4]))
    return replace(spec, hierarchy=None), expert_ranks, expert_ranks * draw(st.sampled_from([1, 2]))


def spread(count: int, seed: int = 0) -> Callable[[Device, str], Hashable]:
    """Spreads the streams of each device over ``count`` queues, in a way of its own."""
    return lambda device, stream: zlib.crc32(f"{seed} {device} {stream}".encode()) % count


@pytest.mark.parametrize("count", QUEUES)
@settings(max_examples=60)
@given(drawn=expert_programs(), data=st.data())
def test_programs_with_receives_on_arrival_end_however_streams_share_queues(count, drawn, data):
    spec, expert_ranks, data_ranks = drawn
    spec = replace(spec, receives_on_arrival=True)
    devices = launched(spec, copies_of(build_program(spec), data_ranks), expert_ranks, data.draw(TOKENS))
    assert finishes(devices, spread(count, data.draw(st.integers(0, 1000))))


@pytest.mark.slow
@pytest.mark.parametrize("expert_ranks", [1, 2, 4])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_every_layout_of_a_layered_program_ends(expert_ranks, zero_stage):
    for ranks, chunks, micro_batches in product((1, 2, 4), (1, 2, 4), (1, 3, 8)):
        placement = place_chunks("modular", ranks * chunks, ranks)
        spec = ProgramSpec(
            placement, "layered", micro_batches, micro_batches, zero_stage=zero_stage, receives_on_arrival=True
        )
        devices = launched(spec, copies_of(build_program(spec), 2 * expert_ranks), expert_ranks)
        for count in QUEUES:
            assert finishes(devices, spread(count)), spec


@settings(max_examples=100)
@given(drawn=expert_programs())
def test_all_to_alls_change_nothing_of_what_the_validator_says(drawn):
    spec, expert_ranks, data_ranks = drawn
    program = build_program(spec)
    try:
        run_in_one_queue(spec, program)
        ends = True
    except DeadlockError:
        ends = False
    assert finishes(launched(spec, copies_of(program, data_ranks), expert_ranks), one_queue) == ends


def spec_of(micro_batches: int, receives_on_arrival: bool = True) -> ProgramSpec:
    return ProgramSpec(
        (0, 1, 0, 1),
        "layered",
        micro_batches,
        micro_batches,
        zero_stage=3,
        receives_on_arrival=receives_on_arrival,
    )


@pytest.mark.parametrize("receives_on_arrival", [True, False])
def test_receives_ahead_block_a_queue(receives_on_arrival):
    """So it is the place of the receives that matters, and the model sees it."""
    spec = spec_of(2, receives_on_arrival)
    devices = launched(spec, copies_of(build_program(spec), 2), expert_ranks=2)
    assert finishes(devices, own_queues)
    assert finishes(devices, one_queue) == receives_on_arrival


def test_ranks_that_divide_experts_have_to_compute_in_one_order():
    spec = spec_of(4)
    programs = copies_of(build_program(spec), 2)
    actions = programs[Device(0, 1)] = [*programs[Device(0, 1)]]
    first, second = (actions.index(Action(Kind.FORWARD, 0, micro_batch, True)) for micro_batch in (1, 2))
    actions[first], actions[second] = actions[second], actions[first]
    assert not finishes(launched(spec, programs, expert_ranks=2), own_queues)


def test_communicators_have_to_work_in_one_order_where_their_streams_share_a_queue():
    order = {0: ["rest", "rest", "experts", "experts"], 1: ["experts", "experts", "rest", "rest"]}
    meetings: dict[Hashable, list[Operation]] = {}
    devices = {}
    for data_rank, streams in order.items():
        launch = Launch(Device(0, data_rank), spec_of(1), 1, meetings)
        for place, stream in enumerate(streams):
            launch.add(stream, [], stream, place % 2)
        devices[launch.device] = launch.operations
    assert finishes(devices, own_queues)
    assert not finishes(devices, one_queue)
