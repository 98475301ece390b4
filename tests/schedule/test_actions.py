import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.schedule.actions import PARTITION, Action, Kind
from ds_lgamp.schedule.program import build_program, mark_recomputed
from tests.schedule.strategies import program_specs


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("F3.5", Action(Kind.FORWARD, 3, 5)),
        ("B3.5", Action(Kind.BACKWARD, 3, 5)),
        ("SEND_F3.5", Action(Kind.SEND_FORWARD, 3, 5)),
        ("RECV_B3.5", Action(Kind.RECV_BACKWARD, 3, 5)),
        ("START_F3.5", Action(Kind.START_FORWARD, 3, 5)),
        ("GATHER3", Action(Kind.GATHER, 3)),
        ("RELEASE3", Action(Kind.RELEASE, 3)),
        ("REDUCE3", Action(Kind.REDUCE, 3)),
        ("REFRESH3", Action(Kind.REFRESH, 3)),
        ("WAIT_COMBINE3", Action(Kind.WAIT_COMBINE, 3)),
        ("LOAD3", Action(Kind.LOAD, 3)),
        ("WAIT_STORE3", Action(Kind.WAIT_STORE, 3)),
        ("STEP", Action(Kind.STEP)),
    ],
)
def test_an_action_is_written_and_parsed_in_this_form(text, action):
    assert str(action) == text
    assert Action.parse(text) == action


@given(st.sampled_from(list(Kind)), st.integers(0, 10**6), st.integers(0, 10**6))
def test_every_action_is_parsed_from_its_text_form(kind, chunk, micro_batch):
    if kind is Kind.STEP:
        action = Action(kind)
    elif kind is Kind.RETURN:
        action = Action(kind, micro_batch=micro_batch)
    elif kind in PARTITION:
        action = Action(kind, chunk)
    else:
        action = Action(kind, chunk, micro_batch)
    assert Action.parse(str(action)) == action


@given(program_specs())
def test_every_action_of_a_program_round_trips(spec):
    for rank, actions in enumerate(build_program(spec)):
        assert mark_recomputed(spec, rank, [[Action.parse(str(action)) for action in actions]]) == [actions]


@pytest.mark.parametrize("text", ["", "F3", "GATHER", "GATHER3.1", "STEP1", "X1.2", "F-1.0", "F1.2 F1.3"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="is no action"):
        Action.parse(text)
