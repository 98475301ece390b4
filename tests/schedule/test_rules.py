"""The validator notices that a pass is wrong, because its rules know nothing of the passes."""

import ast
from dataclasses import replace
from itertools import product

import pytest

from ds_lgamp.schedule import transfers
from ds_lgamp.schedule.actions import Kind, receive_of
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import Hierarchy, Offload, ProgramSpec
from ds_lgamp.schedule.validate import ProgramError, validate
from testing import ROOT
from tests.schedule.broken_passes import PASSES, builder, mistakes
from tests.slow import slow_except

SCHEDULE = ROOT / "ds_lgamp" / "schedule"
RULES = sorted((SCHEDULE / "rules").glob("*.py"))
ALONE = ProgramSpec((0, 0, 0, 0), "layered", 3, 2, 3)
TWO = ProgramSpec((0, 1, 0, 1), "layered", 4, 2, 1)
SPECS = [
    ALONE,
    replace(ALONE, zero_stage=0, updates="next_step"),
    replace(ALONE, zero_stage=2, resident_chunks=1, updates="reduction"),
    replace(ALONE, zero_stage=2, resident_chunks=3, defers_gathers=True, updates="next_step", first_trained=1),
    replace(ALONE, resident_chunks=3, returns_outputs=True, stores_inputs=True),
    replace(ALONE, resident_chunks=1, hierarchy=Hierarchy(2, True), updates="next_step"),
    replace(ALONE, hierarchy=Hierarchy(2, False), updates="reduction"),
    replace(ALONE, hierarchy=Hierarchy(2, False), defers_gathers=True, resident_chunks=1),
    replace(ALONE, zero_stage=1, offload=Offload(), defers_gathers=True, updates="next_step", micro_batch_group=3),
    replace(ALONE, offload=Offload(True), updates="reduction", resident_chunks=3),
    replace(ALONE, offload=Offload(on_device=(0,)), updates="next_step", resident_chunks=1),
    replace(ALONE, offload=Offload(True), updates="next_step", returns_outputs=True, stores_inputs=True),
    replace(ALONE, offload=Offload(True), updates="reduction").evaluation(),
    replace(ALONE, zero_stage=0, stores_inputs=True, micro_batch_group=3),
    TWO,
    replace(TWO, micro_batches=7, micro_batch_group=7, first_trained=1, updates="reduction"),
    replace(TWO, micro_batches=7, micro_batch_group=6, receives_on_arrival=True, stores_inputs=True),
    replace(TWO, micro_batches=6, micro_batch_group=6, zero_stage=3, returns_outputs=True),
    replace(TWO, micro_batch_group=4, returns_outputs=True, receives_on_arrival=True),
    replace(TWO, micro_batches=7, micro_batch_group=7).evaluation(),
    replace(TWO, micro_batches=7, micro_batch_group=7, zero_stage=3, split_backward=2),
    replace(
        TWO, zero_stage=2, resident_chunks=1, split_backward=3, receives_on_arrival=True, whole_chunks=frozenset({3})
    ),
    replace(TWO, micro_batches=7, micro_batch_group=7, overlaps_exchanges=True),
    replace(TWO, micro_batches=5, zero_stage=3, overlaps_exchanges=True, receives_on_arrival=True),
    replace(ALONE, micro_batches=6, micro_batch_group=5, overlaps_exchanges=True, recomputes=False),
    replace(TWO, schedule="interleaved_1f1b", micro_batch_group=4, zero_stage=3),
    ProgramSpec((0, 1, 2, 2, 1, 0), "zbv", 7, 7, 1, split_backward=3),
    ProgramSpec((0, 1, 2), "1f1b", 7, 7, 2, receives_on_arrival=True),
    ProgramSpec((0, 1, 2), "gpipe", 5, 5, 0),
    ProgramSpec((0, 0, 1, 1, 2), "layered", 7, 7, 3, stores_inputs=True),
]


SOME = [(module, 16) for module in PASSES]


@pytest.mark.parametrize(
    ("module", "share"), slow_except(SOME, [(module, share) for module in PASSES for share in (16, 1)], several=True)
)
def test_a_mistake_in_a_pass_does_not_get_past_the_validator(module, share):
    """One in ``share`` of all mistakes of :mod:`tests.schedule.broken_passes`."""
    right = [build_program(spec) for spec in SPECS]
    for spec, program in zip(SPECS, right):
        validate(spec, program)
    found = 0
    for mistake in mistakes(module, share):
        with builder(mistake) as build:
            programs = [build(spec) for spec in SPECS]
        wrong = [(spec, made) for spec, made, program in zip(SPECS, programs, right) if made not in (None, program)]
        for spec, program in wrong:
            with pytest.raises(ProgramError):
                validate(spec, program)
                pytest.fail(f"{mistake} was accepted for {spec}")
        found += bool(wrong)
    assert found > 10 / share


@pytest.mark.parametrize("late", [-1, 1])
def test_receives_that_are_posted_a_compute_before_or_after_their_message_arrives_are_refused(late, monkeypatch):
    spec, stock = ProgramSpec((0, 1, 0, 1), "layered", 8, 8, 0, receives_on_arrival=True), transfers.bisect_left

    def wrong(starts, time):
        return min(max(0, stock(starts, time) + late), len(starts) - 1)

    monkeypatch.setattr(transfers, "bisect_left", wrong)
    with pytest.raises(ProgramError, match="is not posted when its message arrives|needs RECV_B2.0 before it"):
        validate(spec, build_program(spec))


def test_a_receive_that_is_posted_in_time_but_after_its_message_arrives_is_refused(monkeypatch):
    spec, stock = ProgramSpec((0, 1, 0, 1), "layered", 8, 8, 0, receives_on_arrival=True), transfers._on_arrival

    def wrong(spec, rank, computes):
        posts = stock(spec, rank, computes)
        early = [place for place, post in enumerate(posts) if post and receive_of(computes[place]) not in post]
        if early:
            posts[early[0] + 1].insert(0, posts[early[0]].pop())
        return posts

    monkeypatch.setattr(transfers, "_on_arrival", wrong)
    with pytest.raises(ProgramError, match="is not posted when its message arrives"):
        validate(spec, build_program(spec))


def without_last(segments):
    return [[action for action in segment if action.micro_batch < 3] for segment in segments]


def backwards_last_first(segments):
    (computes,) = segments
    backwards = iter([action for action in reversed(computes) if action.kind is Kind.BACKWARD])
    return [[next(backwards) if action.kind is Kind.BACKWARD else action for action in computes]]


def returned_early(segments):
    first, second, *others = segments
    return [first[:-1], [first[-1], *second], *others]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (without_last, "some chunk does not see every micro-batch once"),
        (backwards_last_first, "sums gradients in another order"),
        (returned_early, "stands where its call is not over"),
    ],
)
def test_a_schedule_whose_order_is_wrong_is_refused(change, fault, monkeypatch):
    stock = ProgramSpec.segments
    spec = ProgramSpec((0,), "layered", 4, 4, 0, returns_outputs=change is returned_early)
    monkeypatch.setattr(ProgramSpec, "segments", lambda self, rank: change(stock(self, rank)))
    with pytest.raises(ProgramError, match=fault):
        validate(spec, build_program(spec))


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        *product(["sends_output", "is_final_backward"], [True, False]),
        ("source_rank", 1),
        ("source_rank", None),
    ],
)
def test_a_specification_that_answers_passes_wrongly_is_refused(name, answer, monkeypatch):
    spec = ProgramSpec((0, 0, 1, 1), "layered", 4, 2, 2)
    right, stock = build_program(spec), getattr(ProgramSpec, name)

    def wrong(self, action):
        return answer if action.chunk in (1, 2) else stock(self, action)

    monkeypatch.setattr(ProgramSpec, name, wrong)
    program = build_program(spec)
    assert program != right
    with pytest.raises(ProgramError):
        validate(spec, program)


@pytest.mark.parametrize("path", ["validate.py", "simulate.py", *(f"rules/{path.name}" for path in RULES)])
def test_no_rule_asks_a_pass(path):
    """What they share is the specification, and with simulate the clock."""
    tree = ast.parse((SCHEDULE / path).read_text())
    sources = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert not {f"ds_lgamp.schedule.{module}" for module in (*PASSES, "orders")} & sources
    assert "ds_lgamp.schedule" not in sources
