"""Programs end on devices whose streams share hardware queues, if receives are posted on arrival."""

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings

from ds_lgamp.schedule import transfers
from ds_lgamp.schedule.actions import RECEIVES, SENDS, Kind, send_matching
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import DeadlockError, simulate
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.validate import ProgramError, run_in_one_queue, validate
from tests.schedule.queues import Device, Operation, copies_of, finishes, launched, one_queue, own_queues
from tests.schedule.strategies import program_specs

LINKS = sorted(SENDS | RECEIVES)
SHARED = [
    pytest.param((), id="no stream shares a queue"),
    *(pytest.param(("compute", link), id=f"compute and {link.value} share one") for link in LINKS),
    pytest.param(("compute", *LINKS), id="all share one"),
]


def configurations(receives_on_arrival: bool) -> Iterator[ProgramSpec]:
    for schedule in ("layered", "interleaved_1f1b", "1f1b", "gpipe", "zbv"):
        for ranks in (2, 3, 4):
            for chunks_per_rank in {"layered": (1, 2, 4), "interleaved_1f1b": (1, 2, 4), "zbv": (2,)}.get(
                schedule, (1,)
            ):
                for micro_batches in (1, 2, 4, 12):
                    if schedule != "interleaved_1f1b" or micro_batches % ranks == 0:
                        placement = place_chunks(
                            "vee" if schedule == "zbv" else "modular", ranks * chunks_per_rank, ranks
                        )
                        yield ProgramSpec(
                            placement,
                            schedule,
                            micro_batches,
                            micro_batches,
                            zero_stage=0,
                            receives_on_arrival=receives_on_arrival,
                        )


built = functools.cache(build_program)


def devices_of(spec: ProgramSpec) -> dict[Device, list[Operation]]:
    return launched(spec, copies_of(built(spec), data_ranks=1), expert_ranks=1)


@pytest.mark.parametrize("shared", SHARED)
def test_programs_with_receives_on_arrival_end_however_streams_share_queues(shared):
    for spec in configurations(receives_on_arrival=True):
        assert finishes(devices_of(spec), lambda _, stream: "shared" if stream.split()[0] in shared else stream), spec


def test_programs_with_receives_ahead_end_only_with_queues_of_their_own():
    """So it is the place of the receives that matters, and the model sees it."""
    specs = list(configurations(receives_on_arrival=False))
    assert all(finishes(devices_of(spec), own_queues) for spec in specs)
    stuck = [spec for spec in specs if not finishes(devices_of(spec), one_queue)]
    assert len(stuck) > len(specs) / 2


@settings(max_examples=60)
@given(program_specs(max_ranks=4, max_chunks_per_rank=3, max_micro_batches=6))
def test_the_validator_agrees_with_a_model_of_streams_and_queues(spec):
    """The model has streams, events and waits. The validator only knows one queue."""
    try:
        run_in_one_queue(spec, built(spec))
        ends = True
    except DeadlockError:
        ends = False
    assert finishes(devices_of(spec), one_queue) == ends


@settings(max_examples=100)
@given(program_specs(max_ranks=7, max_chunks_per_rank=4, max_micro_batches=12))
def test_every_program_with_receives_on_arrival_ends_in_one_queue(spec):
    spec = replace(spec, receives_on_arrival=True)
    run_in_one_queue(spec, build_program(spec))


def test_a_program_that_would_block_a_queue_is_refused(monkeypatch):
    """Two ranks of one queue each: both post a receive before the send that the other needs."""
    monkeypatch.setattr(transfers, "_on_arrival", transfers._early)
    spec = ProgramSpec((0, 1, 0, 1), "layered", 2, 2, zero_stage=0, receives_on_arrival=True)
    with pytest.raises(ProgramError, match="deadlock: RECV_F"):
        validate(spec, build_program(spec))


@settings(max_examples=60)
@given(program_specs(max_ranks=4, max_chunks_per_rank=3, max_micro_batches=6))
def test_a_rank_posts_receives_in_the_order_in_which_messages_are_sent(spec):
    program = build_program(replace(spec, receives_on_arrival=True))
    sent = {span.action[:3]: span.end for spans in simulate(spec, program).spans for span in spans}
    for actions in program:
        messages = [send_matching(action) for action in actions if action.kind in RECEIVES]
        kinds = {Kind.SEND_FORWARD: Kind.FORWARD, Kind.SEND_BACKWARD: Kind.BACKWARD}
        arrivals = [sent[kinds[message.kind], message.chunk, message.micro_batch] for message in messages]
        assert arrivals == sorted(arrivals)


def test_a_receive_is_posted_once_its_message_is_sent():
    """On the clock, F0.2 of rank 0 ends when F1.1 of rank 1 does. So rank 0 posts the input of F2.1 behind F0.2."""
    spec = ProgramSpec((0, 1, 0, 1), "layered", 4, 4, zero_stage=0, receives_on_arrival=True)
    texts = [str(action) for action in build_program(spec)[0]]
    forwards = texts[: texts.index("F2.0") + 1]
    assert forwards == (
        "F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_F2.0 F0.2 SEND_F0.2 RECV_F2.1 F0.3 SEND_F0.3 RECV_F2.2 F2.0".split()
    )
