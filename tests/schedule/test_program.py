from collections import Counter

import pytest
from hypothesis import given

from ds_lgamp.schedule.actions import COMPUTE, Action, Kind
from ds_lgamp.schedule.orders import micro_batch_groups
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_program, build_rank_program
from ds_lgamp.schedule.simulate import peak_live_activations
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.validate import validate
from tests.schedule.strategies import live_micro_batches, program_specs


def layered(ranks=1, chunks=4, micro_batches=4, group=None, stage=3, resident=2, **rest):
    placement = place_chunks("modular", chunks, ranks)
    return ProgramSpec(placement, "layered", micro_batches, group or micro_batches, stage, resident, **rest)


def count(actions, kind):
    return sum(action.kind is kind for action in actions)


def test_layered_program_reads_as_the_method_says():
    program = build_program(layered(chunks=3, micro_batches=2))
    assert " ".join(map(str, program[0])) == (
        "GATHER0 GATHER1 WAIT_GATHER0 F0.0 F0.1 RELEASE0 GATHER2 WAIT_GATHER1 F1.0 F1.1 WAIT_GATHER2 F2.0 B2.0 "
        "F2.1 B2.1 REDUCE2 RELEASE2 GATHER0 B1.0 B1.1 REDUCE1 RELEASE1 WAIT_GATHER0 WAIT_REDUCE2 B0.0 B0.1 REDUCE0 "
        "RELEASE0 WAIT_REDUCE1 WAIT_REDUCE0 STEP"
    )


def test_1f1b_program_alternates():
    spec = ProgramSpec((0, 1), "1f1b", 3, 3, 0)
    computes = [str(action) for action in build_rank_program(spec, 0) if action.kind in COMPUTE]
    assert computes == ["F0.0", "F0.1", "B0.0", "F0.2", "B0.1", "B0.2"]


def test_interleaved_program_takes_p_micro_batches_at_a_time():
    spec = ProgramSpec((0, 1, 0, 1), "interleaved_1f1b", 4, 4, 0)
    computes = [str(action) for action in build_rank_program(spec, 1) if action.kind in COMPUTE]
    assert computes[:6] == ["F1.0", "F1.1", "F3.0", "B3.0", "F3.1", "B3.1"]


def test_stages_1_and_2_gather_behind_the_step_what_the_next_one_needs_first():
    spec = layered(chunks=3, micro_batches=1, stage=2)
    forwards = "WAIT_GATHER0 F0.0 WAIT_GATHER1 F1.0 WAIT_GATHER2 F2.0"
    backwards = "B2.0 REDUCE2 B1.0 REDUCE1 WAIT_REDUCE2 B0.0 REDUCE0 WAIT_REDUCE1 WAIT_REDUCE0"
    gathers = "GATHER0 GATHER1 GATHER2"
    assert " ".join(map(str, build_program(spec)[0])) == f"{forwards} {backwards} STEP {gathers}"
    assert " ".join(map(str, build_program(spec.evaluation())[0])) == forwards


def test_deferred_gathers_run_one_chunk_ahead():
    program = build_program(layered(chunks=3, micro_batches=1, stage=2, defers_gathers=True))
    assert " ".join(map(str, program[0])) == (
        "GATHER0 GATHER1 WAIT_GATHER0 F0.0 GATHER2 WAIT_GATHER1 F1.0 WAIT_GATHER2 F2.0 "
        "B2.0 REDUCE2 B1.0 REDUCE1 WAIT_REDUCE2 B0.0 REDUCE0 WAIT_REDUCE1 WAIT_REDUCE0 STEP"
    )


@given(program_specs())
def test_every_program_is_valid(spec):
    validate(spec, build_program(spec))


@given(program_specs())
def test_every_chunk_and_micro_batch_computes_once(spec):
    computed = Counter(action for actions in build_program(spec) for action in actions if action.kind in COMPUTE)
    kinds = [Kind.FORWARD] if spec.forward_only else [Kind.FORWARD, Kind.BACKWARD]
    expected = {
        (kind, chunk, micro_batch)
        for kind in kinds
        for chunk in range(spec.chunks)
        for micro_batch in range(spec.micro_batches)
    }
    assert set(computed) == expected and set(computed.values()) == {1}


@given(program_specs())
def test_gather_and_reduce_counts(spec):
    """The formulas of the method, per rank: N chunks, B resident, K groups."""
    groups = len(micro_batch_groups(spec.micro_batches, spec.micro_batch_group))
    for rank, actions in enumerate(build_program(spec)):
        chunks, resident = spec.placement.count(rank), spec.resident_chunks
        if spec.zero_stage == 0 or (spec.zero_stage < 3 and spec.forward_only and not spec.defers_gathers):
            gathers = 0
        elif spec.zero_stage < 3 or spec.forward_only or resident >= chunks:
            gathers = chunks
        else:
            gathers = groups * (2 * chunks - 2 * resident) + resident
        if spec.schedule != "interleaved_1f1b" or spec.zero_stage < 3 or spec.forward_only:
            assert count(actions, Kind.GATHER) == gathers
        per_group = spec.schedule == "layered" and spec.zero_stage >= 2
        reduces = 0 if spec.forward_only else chunks * (groups if per_group else 1)
        assert count(actions, Kind.REDUCE) == reduces
        assert count(actions, Kind.STEP) == (not spec.forward_only)


@given(program_specs())
def test_prefetch_precedes_the_compute_it_hides_behind(spec):
    """With two or more resident chunks, the gather of the next chunk starts before the first forward of the current
    one."""
    if spec.zero_stage == 0 or (spec.zero_stage == 3 and spec.resident_chunks == 1) or spec.schedule != "layered":
        return
    if spec.zero_stage < 3 and not spec.defers_gathers:
        return
    for rank, actions in enumerate(build_program(spec)):
        chunks = [chunk for chunk, owner in enumerate(spec.placement) if owner == rank]
        texts = [str(action) for action in actions]
        for chunk, following in zip(chunks, chunks[1:]):
            assert texts.index(f"GATHER{following}") < texts.index(f"F{chunk}.0")


@given(program_specs())
def test_gathers_behind_the_step_come_in_the_order_of_the_next_ones_forwards(spec):
    if spec.zero_stage not in (1, 2) or spec.defers_gathers or spec.forward_only:
        return
    for actions in build_program(spec):
        behind = actions[actions.index(Action(Kind.STEP)) + 1 :]
        assert not any(action.kind is Kind.GATHER for action in actions[: -len(behind)])
        forwards = dict.fromkeys(action.chunk for action in actions if action.kind is Kind.FORWARD)
        assert behind == [Action(Kind.GATHER, chunk) for chunk in forwards]


@given(program_specs())
def test_live_activations_of_the_layered_order_are_a_group_per_chunk_and_fewer_at_the_turn(spec):
    if spec.schedule != "layered" or spec.forward_only:
        return
    for rank, actions in enumerate(build_program(spec)):
        own = [chunk for chunk, owner in enumerate(spec.placement) if owner == rank]
        assert peak_live_activations(actions) == sum(live_micro_batches(spec, chunk) for chunk in own)


@given(program_specs())
def test_the_last_chunk_turns_at_once_but_where_all_forwards_come_first(spec):
    """All forwards come first with gpipe, and with interleaved_1f1b if there are as many micro-batches as ranks. A
    single micro-batch turns at once anyway."""
    all_first = {"gpipe": spec.micro_batches > 1, "interleaved_1f1b": spec.micro_batches == spec.pipeline_ranks > 1}
    assert spec.turns_at_once == (not spec.forward_only and not all_first.get(spec.schedule, False))


def test_a_rank_goes_two_forwards_ahead_for_every_chunk_that_follows():
    spec = layered(ranks=3, chunks=3, micro_batches=6)
    forwards_first = [
        next(index for index, action in enumerate(computes) if action.kind is Kind.BACKWARD)
        for computes in ([action for action in actions if action.kind in COMPUTE] for actions in build_program(spec))
    ]
    assert forwards_first == [4 + 1, 2 + 1, 1]


def test_live_activations_of_1f1b_are_the_ranks_that_follow():
    spec = ProgramSpec((0, 1, 2, 3), "1f1b", 8, 8, 0)
    assert [peak_live_activations(actions) for actions in build_program(spec)] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "layerd"}, "use one of layered"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"micro_batch_group": 0}, "micro_batch_group is 0"),
        ({"zero_stage": 4}, "zero_stage is 4"),
        ({"resident_chunks": 0}, "resident_chunks is 0"),
        ({"schedule": "1f1b"}, "takes one chunk per rank"),
        ({"schedule": "interleaved_1f1b", "micro_batches": 3}, "multiple of 2 pipeline ranks"),
        ({"schedule": "interleaved_1f1b", "placement": (0, 1, 0)}, "multiple of 2 pipeline ranks"),
        ({"schedule": "interleaved_1f1b", "placement": (0, 0, 1, 1)}, "needs modular placement"),
        ({"schedule": "interleaved_1f1b", "micro_batch_group": 2}, "groups belong to the layered schedule"),
    ],
)
def test_impossible_combinations_are_refused(changes, message):
    sound = dict(placement=(0, 1, 0, 1), schedule="layered", micro_batches=4, micro_batch_group=4, zero_stage=3)
    with pytest.raises(ValueError, match=message):
        ProgramSpec(**(sound | changes))


def test_a_thousand_gpu_program_is_valid():
    """``python -m benchmarks run programs`` measures how long this takes."""
    spec = layered(ranks=64, chunks=64 * 4, micro_batches=64)
    validate(spec, build_program(spec))
