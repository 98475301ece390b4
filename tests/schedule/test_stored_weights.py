"""Programs in which the host keeps gathered weights for their next use in the step."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_lgamp.cost.traffic import bus_bytes, collective_bytes, predict_traffic
from ds_lgamp.cost.units import ElementBytes, Sharding, UnitSize
from ds_lgamp.schedule.actions import OF_WEIGHTS, Action, Kind
from ds_lgamp.schedule.costs import Durations
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import Hierarchy, Offload, ProgramSpec
from ds_lgamp.schedule.validate import validate
from tests.schedule.mutations import assert_every_mutation_is_refused
from tests.schedule.strategies import program_specs

GATHERS = {Kind.LOAD_WEIGHTS: Kind.GATHER, Kind.WAIT_LOAD_WEIGHTS: Kind.WAIT_GATHER}
"""What a program without the host has in their place."""


def layered(chunks=3, micro_batches=2, **rest):
    group = rest.pop("micro_batch_group", micro_batches)
    return ProgramSpec((0,) * chunks, "layered", micro_batches, group, 3, stores_weights=True, **rest)


def texts(spec):
    return " ".join(map(str, build_program(spec)[0]))


@st.composite
def storing_specs(draw, **limits):
    """Draws a spec that stores gathered weights."""
    spec = draw(program_specs(**limits))
    offload = spec.offload if spec.zero_stage == 3 else None
    return replace(spec, zero_stage=3, hierarchy=None, offload=offload, stores_weights=True)


def count(actions, kind):
    return sum(action.kind is kind for action in actions)


def test_a_program_reads_as_the_method_says():
    assert texts(layered()) == (
        "GATHER0 GATHER1 WAIT_GATHER0 STORE_W0 F0.0 F0.1 "
        "WAIT_STORE_W0 RELEASE0 GATHER2 WAIT_GATHER1 F1.0 F1.1 WAIT_GATHER2 F2.0 B2.0 F2.1 B2.1 REDUCE2 "
        "RELEASE2 LOAD_W0 B1.0 B1.1 REDUCE1 RELEASE1 WAIT_LOAD_W0 WAIT_REDUCE2 B0.0 B0.1 REDUCE0 "
        "RELEASE0 WAIT_REDUCE1 WAIT_REDUCE0 STEP"
    )


def test_groups_load_what_the_first_one_gathered():
    moves = texts(layered(2, 2, micro_batch_group=1, resident_chunks=1)).split()
    of_first = [text for text in moves if text in ("GATHER0", "STORE_W0", "LOAD_W0")]
    assert of_first == ["GATHER0", "STORE_W0", "LOAD_W0", "LOAD_W0"]
    assert [text for text in moves if text in ("GATHER1", "STORE_W1", "LOAD_W1")] == ["GATHER1", "STORE_W1", "LOAD_W1"]


@given(storing_specs())
def test_without_the_host_a_program_is_that_of_gathers(spec):
    for storing, plain in zip(build_program(spec), build_program(replace(spec, stores_weights=False))):
        others = {Kind.LOAD, Kind.WAIT_LOAD}
        left = [
            action._replace(kind=GATHERS.get(action.kind, action.kind))
            for action in storing
            if action.kind in GATHERS or action.kind not in {*OF_WEIGHTS, *others}
        ]
        assert left == [action for action in plain if action.kind not in others]


@given(storing_specs())
def test_each_chunk_is_gathered_once_and_stored_if_it_is_needed_again(spec):
    for storing, plain in zip(build_program(spec), build_program(replace(spec, stores_weights=False))):
        wanted = Counter(action.chunk for action in plain if action.kind is Kind.GATHER)
        found = {
            kind: Counter(action.chunk for action in storing if action.kind is kind)
            for kind in (Kind.GATHER, Kind.LOAD_WEIGHTS, Kind.STORE_WEIGHTS)
        }
        assert found[Kind.GATHER] == Counter(set(wanted))
        assert found[Kind.GATHER] + found[Kind.LOAD_WEIGHTS] == wanted
        again = set(wanted) if spec.returns_outputs else {chunk for chunk, times in wanted.items() if times > 1}
        assert found[Kind.STORE_WEIGHTS] == Counter(again)


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 4), st.integers(1, 6))
def test_a_layered_step_gathers_n_times(chunks, micro_batches, group, resident):
    """N chunks, B resident, K groups: N gathers, K (2N - 2B) + B - N loads, N - B stores; more with groups."""
    group = min(group, micro_batches)
    groups = -(-micro_batches // group)
    (actions,) = build_program(layered(chunks, micro_batches, micro_batch_group=group, resident_chunks=resident))
    assert count(actions, Kind.GATHER) == chunks
    loads = 0 if resident >= chunks else groups * (2 * chunks - 2 * resident) + resident - chunks
    assert count(actions, Kind.LOAD_WEIGHTS) == loads
    if groups == 1:
        assert count(actions, Kind.STORE_WEIGHTS) == max(chunks - resident, 0)


@given(storing_specs())
def test_every_program_is_valid(spec):
    validate(spec, build_program(spec))


@settings(max_examples=30)
@given(storing_specs(max_ranks=2, max_chunks_per_rank=3, max_micro_batches=4), st.integers(0, 1))
def test_every_mutation_is_refused(spec, pick):
    assert_every_mutation_is_refused(spec, pick % spec.pipeline_ranks)


def test_up_to_a_return_programs_with_more_calls_are_alike():
    fewer, more = (texts(layered(3, calls, returns_outputs=True)) for calls in (1, 2))
    assert more.startswith(fewer[: fewer.index("RETURN0")])


def test_an_evaluation_stores_nothing():
    (actions,) = build_program(layered().evaluation(1))
    assert OF_WEIGHTS.isdisjoint(action.kind for action in actions)


@given(storing_specs(max_ranks=3))
def test_the_formula_of_bytes_is_that_of_the_program(spec):
    """Of W ranks a gather sends W - 1 parts; the bus carries whole chunks, there once and back for each load. Frozen
    ones are there from an earlier step, so no step gathers them."""
    sharding, size = Sharding(3, 4), ElementBytes(weights=2)
    for rank, actions in enumerate(build_program(replace(spec, offload=None, updates="step"))):
        own = [chunk for chunk, owner in enumerate(spec.placement) if owner == rank]
        for frozen in (False, True):
            units = [UnitSize(100, 0 if frozen else 100, (chunk,), frozen=frozen) for chunk in own]
            whole = 2 * units[0].part(sharding) * 4
            stores, loads = count(actions, Kind.STORE_WEIGHTS), count(actions, Kind.LOAD_WEIGHTS)
            saved = stores if frozen else 0
            moved = bus_bytes(actions, units, None, sharding, size)
            assert moved == (whole * (loads + saved), whole * (stores - saved))
            counted = predict_traffic(actions, 3, [], [], [(chunk,) for chunk in own])
            if not frozen:
                counted = predict_traffic(actions, 3, own, [])
            gathers = counted.gathers + counted.frozen_gathers
            assert gathers == count(actions, Kind.GATHER) - saved
            sent = sum(collective_bytes(actions, unit, sharding, size) for unit in units)
            assert sent == gathers * whole // 4 * 3 + counted.reduces * 4 * units[0].part(sharding) * 3


def test_loads_take_the_place_of_gathers_on_the_clock():
    """A slow network waits for the gathers of the forward alone, and the bus is busy beside the backward."""
    spec = layered(4, 2)
    durations = Durations(gather=6, weights=1)
    seconds = [
        simulate(each, build_program(each), durations).step_time for each in (spec, replace(spec, stores_weights=False))
    ]
    assert seconds[0] < seconds[1]
    exposed = simulate(spec, build_program(spec), Durations(weights=50)).exposed(Kind.STORE_WEIGHTS)
    assert exposed == [2 * (50 - 2)]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"zero_stage": 2}, "zero_stage is 2: only stage 3 gathers weights again"),
        ({"hierarchy": Hierarchy(2, True)}, "hierarchy is .*: shards of nodes are gathered inside a node"),
    ],
)
def test_impossible_programs_are_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(layered(), **changes)


def test_the_host_loads_shards_only_for_gathers():
    spec = layered(offload=Offload(parameters=True), updates="next_step")
    (actions,) = build_program(spec)
    assert Counter(action.chunk for action in actions if action.kind is Kind.LOAD) == Counter({0: 1, 1: 1, 2: 1})
    assert Action(Kind.LOAD_WEIGHTS, 0) in actions
