"""Programs of scripts that compute the loss from outputs: calls go forward one by one, backwards follow the last."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ds_lgamp.schedule.actions import COMPUTE, RECEIVES, Action, Kind
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.validate import ProgramError, validate
from tests.schedule.strategies import pieces_of, program_specs


def texts(actions):
    return " ".join(map(str, actions))


def test_a_call_goes_forward_through_all_chunks_and_the_backwards_are_layered():
    spec = ProgramSpec((0, 0), "layered", 2, 2, 3, resident_chunks=1, returns_outputs=True)
    (actions,) = build_program(spec)
    assert texts(action for action in actions if action.kind not in (Kind.WAIT_GATHER, Kind.WAIT_REDUCE)) == (
        "GATHER0 F0.0 RELEASE0 GATHER1 F1.0 RELEASE1 RETURN0 "
        "GATHER0 F0.1 RELEASE0 GATHER1 F1.1 RELEASE1 RETURN1 "
        "GATHER1 B1.0 B1.1 REDUCE1 RELEASE1 GATHER0 B0.0 B0.1 REDUCE0 RELEASE0 STEP"
    )


def test_the_ranks_of_a_pipeline_give_one_micro_batch_each_to_a_call():
    spec = ProgramSpec((0, 1), "layered", 4, 4, 0, returns_outputs=True)
    first, second = (texts(spec.computes(rank)) for rank in range(2))
    assert first == "F0.0 F0.1 RETURN0 F0.2 F0.3 RETURN1 B0.0 B0.1 B0.2 B0.3"
    assert second == "F1.0 F1.1 RETURN0 F1.2 F1.3 RETURN1 B1.0 B1.1 B1.2 B1.3"


def test_a_call_has_a_micro_batch_for_every_pipeline_rank():
    with pytest.raises(ValueError, match="micro_batches is 3: a call gives one to each pipeline rank"):
        ProgramSpec((0, 1), "layered", 3, 3, 0, returns_outputs=True)


@given(program_specs(), st.integers(1, 5), st.booleans())
def test_the_script_may_end_a_batch_early_or_late(spec, calls, stores_inputs):
    assume(spec.returns_outputs)
    spec = replace(spec, stores_inputs=stores_inputs, overlaps_exchanges=spec.overlaps_exchanges and not stores_inputs)
    micro_batches = calls * spec.pipeline_ranks
    other = replace(spec, micro_batches=micro_batches, micro_batch_group=micro_batches)
    for rank, actions in enumerate(build_program(spec)):
        pieces, others = list(pieces_of(actions)), list(pieces_of(build_program(other)[rank]))
        common = min(len(pieces), len(others)) - 1
        assert pieces[:common] == others[:common]


@given(program_specs())
def test_nothing_of_a_call_is_left_when_the_script_has_its_turn(spec):
    assume(spec.returns_outputs)
    for actions in build_program(spec):
        resident, loaded, posted = set(), set(), set()
        for action in actions:
            kind, chunk, micro_batch, *_ = action
            if kind is Kind.GATHER:
                resident.add(chunk)
            elif kind is Kind.RELEASE:
                resident.discard(chunk)
            elif kind is Kind.LOAD:
                loaded.add(chunk)
            elif kind is Kind.WAIT_LOAD:
                loaded.discard(chunk)
            elif kind in RECEIVES:
                posted.add((chunk, micro_batch))
            elif kind in COMPUTE:
                posted.discard((chunk, micro_batch))
            elif kind is Kind.RETURN:
                assert not loaded and not posted
                assert spec.zero_stage < 3 or not resident


@given(program_specs(max_micro_batches=4))
def test_no_rank_begins_a_call_before_all_have_ended_the_one_before(spec):
    assume(spec.returns_outputs)
    ends, starts = [], []
    for spans in simulate(spec, build_program(spec)).spans:
        by_call = [[], *([] for _ in range(spec.micro_batches // spec.pipeline_ranks))]
        for span in spans:
            forward = span.action.kind is Kind.FORWARD
            by_call[span.action.micro_batch // spec.pipeline_ranks if forward else -1].append(span)
        ends.append([max((span.end for span in call), default=0.0) for call in by_call])
        starts.append([min((span.start for span in call), default=float("inf")) for call in by_call])
    for ended, started in zip(list(zip(*ends))[:-1], list(zip(*starts))[1:]):
        assert max(ended) <= min(started)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_program_without_a_return_is_refused(ranks):
    spec = ProgramSpec(tuple(range(ranks)), "layered", 2 * ranks, 2 * ranks, 3, returns_outputs=True)
    program = build_program(spec)
    program[0].remove(Action(Kind.RETURN, micro_batch=0))
    with pytest.raises(ProgramError, match="RETURN0"):
        validate(spec, program)


def test_a_chunk_that_stays_resident_over_the_turn_of_the_script_is_refused():
    spec = ProgramSpec((0,), "layered", 2, 2, 3, returns_outputs=True)
    (actions,) = build_program(spec)
    release, gather = Action(Kind.RELEASE, 0), Action(Kind.GATHER, 0)
    first = actions.index(release)
    del actions[first]
    again = actions.index(gather, first)
    del actions[again : again + 2]
    with pytest.raises(ProgramError, match="RELEASE0"):
        validate(spec, [actions])
