import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import DeadlockError, simulate
from ds_lgamp.schedule.spec import Hierarchy, ProgramSpec
from ds_lgamp.schedule.validate import ProgramError, validate
from tests.schedule.mutations import assert_every_mutation_is_refused
from tests.schedule.strategies import program_specs


@settings(max_examples=40)
@given(program_specs(max_ranks=3, max_chunks_per_rank=3, max_micro_batches=5), st.integers(0, 2))
def test_every_single_mutation_is_refused(spec, pick):
    """The rules leave exactly one place for every action, so the validator refuses all mutations and not only 99 % of
    them."""
    assert_every_mutation_is_refused(spec, pick % spec.pipeline_ranks)


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("defers_gathers", [False, True])
def test_every_single_mutation_of_a_program_with_shards_of_nodes_is_refused(replicated, defers_gathers):
    hierarchy = Hierarchy(2, replicated)
    spec = ProgramSpec((0,) * 4, "layered", 2, 1, 3, defers_gathers=defers_gathers, hierarchy=hierarchy)
    assert_every_mutation_is_refused(spec, 0)


@pytest.mark.parametrize("hierarchy", [None, Hierarchy(2, False)])
def test_an_update_stands_behind_the_last_reduction_of_its_chunk_and_nowhere_else(hierarchy):
    spec = ProgramSpec((0, 0), "layered", 2, 1, 3, updates="reduction", hierarchy=hierarchy)
    (actions,) = build_program(spec)
    update, end = Action(Kind.UPDATE, 1), Action(Kind.WAIT_REDUCE if hierarchy is None else Kind.WAIT_COMBINE, 1)
    first, last = (row for row, action in enumerate(actions) if action == end)
    assert actions[last + 1] == update
    without = [action for action in actions if action != update]
    for row in range(len(without) + 1):
        moved = [*without[:row], update, *without[row:]]
        if row == last + 1:
            validate(spec, [moved])
            continue
        with pytest.raises(ProgramError, match="UPDATE1"):
            validate(spec, [moved])
        with pytest.raises(ProgramError, match="UPDATE1"):
            validate(spec, [[*actions[:row], update, *actions[row:]]])
    behind_first = [*actions[: first + 1], update, *actions[first + 1 :]]
    with pytest.raises(ProgramError, match="UPDATE1 does not belong here"):
        validate(spec, [behind_first])
    with pytest.raises(ProgramError, match="UPDATE1"):
        validate(spec, [without])


def test_distant_swaps_are_refused():
    spec = ProgramSpec((0, 1, 0, 1), "layered", 4, 4, 3)
    program = build_program(spec)
    generator = random.Random(0)
    for _ in range(300):
        rank = generator.randrange(2)
        first, second = sorted(generator.sample(range(len(program[rank])), 2))
        faulty = [list(actions) for actions in program]
        faulty[rank][first], faulty[rank][second] = faulty[rank][second], faulty[rank][first]
        with pytest.raises(ProgramError):
            validate(spec, faulty)


def test_a_fault_names_rank_and_row_and_shows_the_rows_around_it():
    spec = ProgramSpec((0, 1), "layered", 2, 2, 0)
    program = build_program(spec)
    row = program[1].index(Action(Kind.SEND_BACKWARD, 1, 0))
    del program[1][row]
    with pytest.raises(ProgramError) as refused:
        validate(spec, program)
    message = str(refused.value)
    assert f"pipeline rank 1, row {row}: the result must be sent at once by SEND_B1.0" in message
    assert f"> {row:6d} {program[1][row]}" in message and message.count("\n") >= 5


def test_more_resident_chunks_than_allowed_are_refused():
    generous = ProgramSpec((0, 0, 0, 0), "layered", 2, 2, 3, resident_chunks=3)
    strict = ProgramSpec((0, 0, 0, 0), "layered", 2, 2, 3, resident_chunks=2)
    with pytest.raises(ProgramError, match="gathers"):
        validate(strict, build_program(generous))


def test_a_deadlock_is_found_without_running():
    """Two ranks each wait for the other's activation before they send their own."""
    spec = ProgramSpec((0, 1, 0, 1), "layered", 1, 1, 0)
    program = [
        [Action.parse(text) for text in ["RECV_F2.0", "F2.0", "F0.0", "SEND_F0.0"]],
        [Action.parse(text) for text in ["RECV_F1.0", "F1.0", "SEND_F1.0"]],
    ]
    with pytest.raises(DeadlockError) as stuck:
        simulate(spec, program)
    assert stuck.value.positions == [1, 1]


def test_a_backward_needs_its_forward():
    spec = ProgramSpec((0,), "layered", 1, 1, 0)
    with pytest.raises(DeadlockError):
        simulate(spec, [[Action(Kind.BACKWARD, 0, 0), Action(Kind.FORWARD, 0, 0)]])


def test_a_send_blocks_until_its_receive_is_posted():
    """The validator is pessimistic: the same program runs if sends do not block."""
    spec = ProgramSpec((0, 1, 0, 1), "layered", 2, 2, 0, recomputes=False)
    late = [list(actions) for actions in build_program(spec)]
    late[0] = [action for action in late[0] if action.kind is not Kind.RECV_FORWARD]
    first_use = late[0].index(Action(Kind.FORWARD, 2, 0))
    late[0][first_use:first_use] = [Action(Kind.RECV_FORWARD, 2, 0), Action(Kind.RECV_FORWARD, 2, 1)]
    for actions in late[1:]:
        posts = [action for action in actions if action.kind is Kind.RECV_FORWARD]
        actions[:] = [action for action in actions if action.kind is not Kind.RECV_FORWARD]
        for post in posts:
            actions.insert(actions.index(Action(Kind.FORWARD, post.chunk, post.micro_batch)), post)
    simulate(spec, late)
    with pytest.raises(DeadlockError):
        simulate(spec, late, blocking_sends=True)
