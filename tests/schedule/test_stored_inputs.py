"""Inputs of chunks that wait on the host: where they leave and come back, and which programs are refused."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.schedule.actions import COMPUTE, NEAREST, OF_INPUTS, Action, Kind
from ds_lgamp.schedule.costs import Durations
from ds_lgamp.schedule.program import build_program, build_rank_program, mark_recomputed
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.validate import ProgramError, validate
from tests.schedule.strategies import program_specs

LGA = ProgramSpec((0, 0, 0), "layered", 3, 3, 0, stores_inputs=True)
storing_specs = program_specs().map(
    lambda spec: replace(spec, stores_inputs=True, forward_only=False, recomputes=True, overlaps_exchanges=False)
)


def of_kind(actions, kind):
    return [action for action in actions if action.kind is kind]


def test_inputs_leave_behind_their_forward_and_come_back_one_compute_ahead_of_their_backward():
    assert " ".join(map(str, build_rank_program(LGA, 0))) == (
        "F0.0 F0.1 F0.2 "
        "F1.0 STORE_A1.0 F1.1 WAIT_STORE_A1.0 STORE_A1.1 F1.2 WAIT_STORE_A1.1 STORE_A1.2 "
        "F2.0 B2.0 F2.1 B2.1 F2.2 WAIT_STORE_A1.2 LOAD_A1.0 B2.2 REDUCE2 "
        "LOAD_A1.1 WAIT_LOAD_A1.0 B1.0 LOAD_A1.2 WAIT_LOAD_A1.1 B1.1 WAIT_LOAD_A1.2 B1.2 REDUCE1 "
        "B0.0 B0.1 B0.2 REDUCE0 WAIT_REDUCE2 WAIT_REDUCE1 WAIT_REDUCE0 STEP"
    )


def test_inputs_come_back_behind_the_turn_of_the_script():
    spec = ProgramSpec((0, 0), "layered", 1, 1, 0, stores_inputs=True, returns_outputs=True)
    assert " ".join(map(str, build_rank_program(spec, 0))).startswith(
        "F0.0 F1.0 STORE_A1.0 RETURN0 WAIT_STORE_A1.0 LOAD_A1.0 WAIT_LOAD_A1.0 B1.0 REDUCE1 B0.0"
    )


@given(storing_specs)
def test_every_program_is_sound(spec):
    program = build_program(spec)
    validate(spec, program)
    for rank, actions in enumerate(program):
        assert mark_recomputed(spec, rank, [[Action.parse(str(action)) for action in actions]]) == [actions]


@given(storing_specs)
def test_every_input_that_is_not_needed_soon_leaves_and_comes_back_once(spec):
    for rank in range(spec.pipeline_ranks):
        actions = build_rank_program(spec, rank)
        computes = [action for action in actions if action.kind in COMPUTE]
        expected = Counter(
            (action.chunk, action.micro_batch)
            for place, action in enumerate(computes)
            if action.kind is Kind.FORWARD
            and action.chunk >= max(1, spec.first_trained)
            and action[1:3] not in spec.kept
            and (spec.returns_outputs or computes.index(action._replace(kind=Kind.BACKWARD)) - place >= NEAREST)
        )
        for kind in OF_INPUTS:
            assert Counter(action[1:3] for action in of_kind(actions, kind)) == expected, kind


@given(storing_specs)
def test_few_inputs_are_on_the_device(spec):
    """An input on its way counts at both ends."""
    for rank in range(spec.pipeline_ranks):
        actions = build_rank_program(spec, rank)
        leaving = {action[1:3] for action in of_kind(actions, Kind.STORE_INPUT)}
        here = most = 0
        for action in actions:
            if action[1:3] in leaving:
                here += action.kind in (Kind.FORWARD, Kind.LOAD_INPUT)
                here -= action.kind in (Kind.WAIT_STORE_INPUT, Kind.BACKWARD)
                most = max(most, here)
        assert most <= 4, "two leave, and two come back"


@given(storing_specs, st.data())
def test_a_program_that_lacks_one_of_the_actions_is_refused(spec, data):
    program = build_program(spec)
    places = [
        (rank, row) for rank, actions in enumerate(program) for row, a in enumerate(actions) if a.kind in OF_INPUTS
    ]
    if places:
        rank, row = data.draw(st.sampled_from(places))
        del program[rank][row]
        with pytest.raises(ProgramError, match="inputs move by"):
            validate(spec, program)


@pytest.mark.parametrize("text", ["STORE_A0.0", "STORE_A2.0", "STORE_A1.0", "LOAD_A1.0"])
def test_an_input_that_need_not_leave_is_refused(text):
    program = build_program(LGA)
    program[0].insert(program[0].index(Action.parse("B2.0")), Action.parse(text))
    with pytest.raises(ProgramError, match=f"before B2.0 inputs move by {text}; first must stand none"):
        validate(LGA, program)


def test_copies_that_are_faster_than_computes_take_no_time_on_the_clock():
    program = build_program(LGA)
    without = simulate(LGA, program, Durations(recompute=1)).step_time
    assert simulate(LGA, program, Durations(recompute=1, input=1)).step_time == without
    slow = simulate(LGA, program, Durations(recompute=1, input=20))
    assert slow.step_time > without and sum(slow.exposed(Kind.LOAD_INPUT)) > 0


def test_two_inputs_that_leave_at_once_are_refused():
    program = build_program(LGA)
    wait, store = Action.parse("WAIT_STORE_A1.0"), Action.parse("STORE_A1.1")
    place = program[0].index(wait)
    program[0][place : place + 2] = [store, wait]
    with pytest.raises(ProgramError, match="first must stand WAIT_STORE_A1.0 STORE_A1.1"):
        validate(LGA, program)
