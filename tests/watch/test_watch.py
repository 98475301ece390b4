"""When ranks ask, warn and end, by an invented clock; and where a rank stands, as another thread sees it."""

import math
import os
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.watch import last_words
from ds_lgamp.watch.connections import Member
from ds_lgamp.watch.last_words import dump_flight_recorder
from ds_lgamp.watch.lifeline import Lifeline, Process
from ds_lgamp.watch.stalls import ANSWER, Asking, AwakeClock, Rounds, StallTalk, stalls
from ds_lgamp.watch.standing import Neighbours, Standing, Wait
from ds_lgamp.watch.this_rank import this_rank
from ds_lgamp.watch.whereabouts import FIRST_BATCH, Observer, Place, Whereabouts
from testing.ranks import run_on_ranks

LIMIT = 120.0
MESSAGE = Wait((1,), "the activation that rank 1 sends after F0.0", "SEND_F", 1)


def standing(rank, seconds, *waits, limit=LIMIT):
    return Standing(rank, "in F1.0", 7, "step 7", 3, True, seconds, limit, waits)


def judged(rounds, now, own, answers=(), gone=None):
    """Runs a round of questions to rank 1."""
    rounds.want()
    assert rounds.is_due(now)
    rounds.begin({1}, now)
    for answer in answers:
        rounds.hear(answer)
    end = now if answers else now + ANSWER
    assert rounds.is_complete(end)
    return rounds.judge(own, gone or {}, end)


def test_a_round_waits_for_answers_but_not_for_ever():
    rounds = Rounds()
    rounds.want()
    rounds.begin({1, 2}, 100.0)
    rounds.hear(standing(1, 0.0))
    assert not rounds.is_complete(100.0 + ANSWER / 2) and rounds.is_complete(100.0 + ANSWER)
    rounds.hear(standing(2, 0.0))
    assert rounds.is_complete(100.0)


def test_warnings_come_at_30_seconds_and_whenever_the_wait_has_doubled_and_the_end_at_the_limit():
    rounds, told = Rounds(), {}
    for seconds in range(5, 200, 5):
        said = judged(rounds, 1000.0 + seconds, standing(0, seconds, MESSAGE), [standing(1, seconds)])
        if said is not None:
            told[seconds] = said.is_over
        if said is not None and said.is_over:
            break
    assert told == {30: False, 60: False, 120: True}


def test_a_short_limit_warns_earlier():
    said = judged(Rounds(), 1000.0, standing(0, 2.0, MESSAGE, limit=8.0), [standing(1, 2.0, limit=8.0)])
    assert said is not None and not said.is_over


def test_a_rank_that_moves_is_no_stall_however_long_others_wait():
    assert judged(Rounds(), 1000.0, standing(0, 500.0, MESSAGE), [standing(1, 1.0)]) is None


def test_a_rank_that_answered_a_moment_ago_is_silent_only_since_then():
    rounds = Rounds()
    assert judged(rounds, 1000.0, standing(0, 500.0, MESSAGE), [standing(1, 1.0)]) is None
    assert judged(rounds, 1006.0, standing(0, 506.0, MESSAGE)) is None
    said = judged(rounds, 1126.0, standing(0, 626.0, MESSAGE))
    assert said.is_over and said.culprits == (1,) and said.seconds == 120 + ANSWER
    # It answers again.
    assert judged(rounds, 1140.0, standing(0, 640.0, MESSAGE), [standing(1, 1.0)]) is None


def test_without_a_limit_ranks_only_warn():
    said = judged(Rounds(), 9e6, standing(0, 9e5, MESSAGE, limit=math.inf), [standing(1, 9e5, limit=math.inf)])
    assert said is not None and not said.is_over


def test_a_rank_names_a_hub_that_does_not_react():
    asking = Asking()
    assert asking.stalls(standing(2, 5.0, MESSAGE), 0, 1000.0) is None
    asking.hear()
    assert asking.stalls(standing(2, 30.0, MESSAGE), 0, 1025.0) is None
    said = asking.stalls(standing(2, 65.0, MESSAGE), 0, 1060.0)
    assert not said.is_over and said.culprits == (0,)
    assert asking.stalls(standing(2, 160.0, MESSAGE), 0, 1145.0).is_over


def test_only_a_rank_that_waits_asks():
    assert stalls(standing(0, 6.0, MESSAGE)) and not stalls(standing(0, 4.0, MESSAGE)) and not stalls(standing(0, 60.0))


SPEC = ProgramSpec((0, 1, 0, 1), "layered", 2, 2, 3)
PROGRAM = build_program(SPEC)[1]


class Stands(SimpleNamespace):
    """An executor that stands still."""


def running(action, doing):
    row = [str(each) for each in PROGRAM].index(action)
    return Stands(
        program=PROGRAM,
        **{
            "row": row,
            "doing": doing,
            "current": PROGRAM[row],
            "neighbours": Neighbours((0, 1, 0, 1), (1, 3)),
            "begun": set(),
        },
    )


@contextmanager
def in_batch(executor):
    """A batch of this thread."""
    whereabouts = Whereabouts()
    with whereabouts.in_batch(executor, "step 5", True, LIMIT):
        whereabouts.place = Place.BATCH
        yield whereabouts


def test_a_position_ages_until_it_changes():
    executor = running("F1.0", "activation")
    with in_batch(executor) as whereabouts:
        observer = Observer(1, whereabouts)
        ages = [observer.look(now).seconds for now in (10.0, 11.0, 40.0)]
        executor.doing = "forward"
        ages.append(observer.look(41.0).seconds)
        executor.row += 1
        ages.append(observer.look(42.0).seconds)
    ages += [observer.look(now).seconds for now in (43.0,)]
    assert ages == [0, 1, 30, 0, 0, 0]


def test_what_a_rank_waits_for_is_read_off_the_program():
    texts = {}
    for action, doing in [
        ("F1.0", "activation"),
        ("B1.1", "gradient"),
        ("WAIT_GATHER1", "gather"),
        ("F1.1", "forward"),
    ]:
        with in_batch(running(action, doing)) as whereabouts:
            own = Observer(1, whereabouts).look(0.0, closely=True)
        texts[own.place] = [wait.text for wait in own.waits]
        assert own.inside and own.label == "step 5" and own.batch == 1 and "test_watch.py" in own.stack
    assert texts == {
        "in F1.0": ["the activation that rank 0 sends after F0.0"],
        "in B1.1": ["the gradient that rank 0 sends after B2.1"],
        "in WAIT_GATHER1": ["GATHER1 with ranks 1, 3"],
        "in F1.1": [],
    }


def test_a_rank_that_waits_for_a_thread_which_talks_to_all_ranks_waits_for_them():
    whereabouts = Whereabouts()
    with whereabouts.waiting_for("the save in the background"):
        (wait,) = Observer(1, whereabouts).look(0.0, closely=True).waits
    assert wait.text == "the save in the background with all ranks" and wait.ranks == ()
    assert not Observer(1, whereabouts).look(0.0, closely=True).waits


def test_the_first_batch_may_take_longer_and_the_first_evaluation_too():
    whereabouts, executor, limits = Whereabouts(), running("F1.0", ""), []
    for training in (True, True, False, False):
        with whereabouts.in_batch(executor, "", training, LIMIT):
            limits.append(whereabouts.limit)
        assert whereabouts.limit == LIMIT
    assert limits == [FIRST_BATCH * LIMIT, LIMIT, FIRST_BATCH * LIMIT, LIMIT]


def test_a_rank_that_compiles_says_so_once_and_may_take_as_long_as_in_its_first_batch(capfd):
    whereabouts, executor, seen = Whereabouts(), running("F1.0", ""), []
    executor.begun.add(True)
    observer = Observer(1, whereabouts)
    whereabouts.begin_compiling()
    assert not whereabouts.is_compiling, "a script may compile outside of batches"
    with whereabouts.in_batch(executor, "step 5", True, LIMIT):
        whereabouts.place = Place.BATCH
        for moment in range(2):
            observer.look(100.0 * moment)
            whereabouts.begin_compiling()
            observer.look(100.0 * moment + 40.0)
            seen.append(observer.look(100.0 * moment + 90.0))
            whereabouts.end_compiling()
            assert whereabouts.limit == LIMIT and not whereabouts.is_compiling
    assert [(each.seconds, each.limit, each.compiles) for each in seen] == [(50.0, FIRST_BATCH * LIMIT, True)] * 2
    assert capfd.readouterr().err == "ds_lgamp: step 5 compiles what layers compute, which may take minutes\n"


def test_whoever_waits_for_a_rank_that_compiles_tells_of_progress_instead_of_a_stall(capfd):
    compiles = standing(1, 40.0, limit=FIRST_BATCH * LIMIT)._replace(compiles=True)
    stall = judged(Rounds(), 100.0, standing(0, 40.0, MESSAGE), [compiles])
    assert stall.progress == "rank 1 compiles in F1.0 of step 7, for 40 s" and not stall.is_over
    assert stall.limit == FIRST_BATCH * LIMIT
    talk = StallTalk(Member(0, "host", "", 0), 2, Whereabouts(), lambda *_: pytest.fail("ends the job"))
    talk._report(stall)
    assert capfd.readouterr().err == "ds_lgamp: rank 1 compiles in F1.0 of step 7, for 40 s\n"


def test_a_new_limit_is_told_before_the_batch_begins():
    whereabouts, executor, told = Whereabouts(), running("F1.0", ""), []
    whereabouts.on_new_limit = told.append
    for _ in range(2):
        with whereabouts.in_batch(executor, "", True, LIMIT):
            told.append("batch")
    assert told == [FIRST_BATCH * LIMIT, "batch", LIMIT, "batch"]


def test_an_engine_that_is_gone_is_not_kept_alive():
    whereabouts, executor = Whereabouts(), running("F1.0", "")
    with whereabouts.in_batch(executor, "step 5", True, LIMIT):
        assert whereabouts.executor is executor
    del executor
    assert whereabouts.executor is None and str(whereabouts) == "outside of a batch after step 5"
    assert Observer(1, whereabouts).look(0.0, closely=True).done == {}


def test_two_engines_in_turn_have_a_limit_a_first_batch_and_a_program_each():
    whereabouts, first, second = Whereabouts(), running("F1.0", "activation"), running("F1.1", "")
    observer, seen = Observer(1, whereabouts), []
    for number in (1, 2):
        for executor, limit in ((first, LIMIT), (second, LIMIT / 2)):
            with whereabouts.in_batch(executor, f"step {number}", True, limit):
                whereabouts.place = Place.BATCH
                standing = observer.look(0.0, closely=True)
                seen.append((standing.limit, standing.place, len(standing.waits), standing.label))
    del second, executor
    with whereabouts.in_batch(first, "step 3", True, LIMIT):
        whereabouts.place = Place.BATCH
        last = observer.look(0.0, closely=True)
    assert seen == [
        (FIRST_BATCH * LIMIT, "in F1.0", 1, "step 1"),
        (FIRST_BATCH * LIMIT / 2, "in F1.1", 0, "step 1"),
        (LIMIT, "in F1.0", 1, "step 2"),
        (LIMIT / 2, "in F1.1", 0, "step 2"),
    ]
    assert (last.limit, last.place, len(last.waits), last.batch) == (LIMIT, "in F1.0", 1, 5)


def test_a_batch_that_fails_does_not_count_as_the_first_and_is_said_to_have_failed():
    whereabouts, executor = Whereabouts(), running("F1.0", "")
    with pytest.raises(ArithmeticError), whereabouts.in_batch(executor, "step 5", True, LIMIT):
        raise ArithmeticError
    assert not executor.begun and str(whereabouts) == "outside of a batch after step 5, which failed"


def calls_of_torch():
    """Returns what a rank waits for in calls of torch.distributed: rank 0 enters, and rank 1 comes late."""
    found, ranks_of = [], dist.get_process_group_ranks
    # Early releases of torch know no group None here.
    dist.get_process_group_ranks = lambda group: {}[None] if group is None else ranks_of(group)
    group = dist.new_group([0, 1])
    calls = [
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.barrier(group),
        lambda: dist.recv(torch.ones(1), 1) if dist.get_rank() == 0 else dist.send(torch.ones(1), 0),
        lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
    ]
    whereabouts = Whereabouts()
    for call in calls:
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(1)
            call()
            continue
        look = threading.Timer(0.5, lambda: found.append(Observer(0, whereabouts).look(0.0, closely=True)))
        look.start()
        call()
        look.join()
    return [(wait.text, wait.ranks, wait.blocks) for each in found for wait in each.waits]


def test_calls_of_torch_say_for_which_ranks_they_wait():
    found, _ = run_on_ranks(2, calls_of_torch)
    assert found == [
        ("all_reduce with ranks 0, 1", (0, 1), True),
        ("barrier with ranks 0, 1", (0, 1), True),
        ("recv with rank 1", (1,), False),
        ("what it has begun with all ranks", (), False),
    ]


LOOKS = 500
BUDGET = 20e-6
"""Seconds of a look."""


def looks_at_itself():
    """Returns the processor time of a look at a rank that gets on, in seconds."""
    this_rank.start()
    executor = running("F1.0", "forward")
    with this_rank.whereabouts.in_batch(executor, "step 5", True, LIMIT):
        this_rank.whereabouts.place = Place.BATCH
        begin = time.thread_time()
        # In a row: alone, a look takes as long as a core needs to wake up, which is the machine's affair.
        for number in range(LOOKS):
            executor.row = number % len(executor.program)
            this_rank.lifeline.stalls.look({}, None)
        return (time.thread_time() - begin) / LOOKS


@pytest.mark.timing
def test_a_look_at_a_rank_that_gets_on_costs_microseconds():
    for seconds in run_on_ranks(2, looks_at_itself):
        print(f"{1e6 * seconds:.0f} us")
        assert seconds < BUDGET


def dumps_the_record(folder):
    """As on NCCL, with a record that is invented."""
    torch._C._distributed_c10d._dump_nccl_trace = lambda: b"record"
    os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = f"{folder}/trace_"
    without = dump_flight_recorder(dist.get_rank())
    dist.get_backend = lambda *_: "nccl"
    return without, dump_flight_recorder(dist.get_rank())


def test_the_record_of_nccl_is_written_to_the_file_that_torch_is_told(tmp_path):
    (found,) = run_on_ranks(1, dumps_the_record, tmp_path)
    assert found == (None, tmp_path / "trace_0") and found[1].read_bytes() == b"record"


def test_the_clock_stands_still_while_the_process_is_suspended():
    times = iter([100.0, 101.0, 102.5, 4000.0, 4001.0])
    clock = AwakeClock(lambda: next(times))
    assert [clock.now() for _ in range(4)] == [101.0, 102.5, 102.5, 103.5]


def test_last_words_are_said_even_where_no_thread_starts_any_more(monkeypatch, capfd):
    def refuse(_):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    last_words.say("last words")
    assert capfd.readouterr().err == "last words"


def test_a_rank_does_not_wait_for_somebody_to_read_what_it_says(monkeypatch):
    read, written = threading.Event(), threading.Event()

    def write(text):
        read.wait(10)
        written.set()

    monkeypatch.setattr(last_words, "_write", write)
    last_words.say("rank 0 ends")
    assert not written.is_set()
    read.set()


def test_a_rank_names_another_that_fails_again_after_it_went_on():
    process = Process(SimpleNamespace(), this_rank.whereabouts, SimpleNamespace())
    lifeline = Lifeline(Member(0, "here", "127.0.0.1", 0), socket.create_server(("127.0.0.1", 0)), "", 2, process)
    try:
        for cause in ("first", "second"):
            lifeline._hear_of_failure(f"rank 1 failed ({cause})", SimpleNamespace())
            assert f"rank 1 failed ({cause})" in lifeline.news()
            lifeline._hear_of_failure("", SimpleNamespace())
    finally:
        lifeline.let_go()
