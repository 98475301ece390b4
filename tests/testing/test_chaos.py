"""What the judge of testing.chaos refuses, and one disturbed job."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from ds_lgamp.checkpoint.folder import STATE
from ds_lgamp.checkpoint.whole import write_whole
from testing.chaos import judge as judging
from testing.chaos import run as running
from testing.chaos.faults import DOORS, FAULTS, HOST
from testing.chaos.jobs import Job, random_job
from testing.chaos.judge import HANG, LATE, LOST, REMAINS, STATUS, UNNAMED, WRONG, Judged, judge, named, of_curve
from testing.chaos.record import Run, add, page_block
from testing.chaos.started import OF, End, _Started, _Starving
from testing.checkpoints import example, flip
from testing.namespaces import NetworkUnavailable

JOB = Job(
    **{"door": "pipeline", "pipeline_ranks": 2, "data_ranks": 1, "zero_stage": 1, "schedule": "layered"},
    **{"micro_batches": 2, "layers": 4, "save_every": 1, "asynchronous_save": True},
    **{"fault": "SIGKILL", "rank": 1, "step": 3, "place": "forward", "delay": 0.0, "again": (1, 2, 3)},
)
DIED = f"ds_lgamp: rank 1 on {HOST} died; this rank, 0 on {HOST}, ends in F0.0 of step 3\n"
GOOD = End(status=1, seconds=4.0, output=DIED, met=True)


def kinds(end, **job):
    return [complaint.kind for complaint in judging.of_end(JOB._replace(**job), end)]


def test_a_job_that_ends_in_time_and_names_the_right_rank_is_well():
    assert kinds(GOOD) == []
    assert kinds(End(0, 20.0, "", met=True), fault="pause") == []
    assert kinds(End(0, 20.0, "", met=False)) == [], "a fault that did not happen must not end the job"
    assert kinds(GOOD._replace(output=""), fault="all killed") == []
    assert kinds(GOOD, fault="all killed") == [WRONG], "no rank has outlived the others"


@pytest.mark.parametrize(
    ("end", "complaints"),
    [
        (GOOD._replace(status=None), [HANG]),
        (GOOD._replace(status=0), [STATUS]),
        (GOOD._replace(met=False), [STATUS, WRONG]),
        (GOOD._replace(seconds=16.0), [LATE]),
        (GOOD._replace(seconds=16.0, starved=2.0), []),
        (GOOD._replace(output=""), [UNNAMED]),
        (GOOD._replace(output=DIED.replace("rank 1 on", "rank 0 on")), [UNNAMED, WRONG]),
        (GOOD._replace(output=DIED + DIED.replace("rank 1 on", "rank 0 on")), [WRONG]),
        (GOOD._replace(left=("python train.py",)), [REMAINS]),
    ],
)
def test_the_judge_says_what_is_wrong_with_an_end(end, complaints):
    assert kinds(end) == complaints


WAITED = "ds_lgamp: rank 0 has waited 8 s in F1.0 of step 3 for the activation that rank 1 sends after F0.0; "
ENDS = f"; this rank, 0 on {HOST}, ends in F1.0 of step 3\n"


@pytest.mark.parametrize(
    ("clause", "blamed"),
    [
        ("rank 1 stands in F0.0 for 8 s and waits for no rank", {1}),
        ("rank 1 stands in F0.0, waiting for F0.0 of rank 2; rank 2 does not answer since 12:00:00", {2}),
        ("rank 1, which would know why, does not answer since 12:00:00", {1}),
        ("rank 1 has done its part, so the link between ranks 1 and 0 is down", {0, 1}),
    ],
)
def test_the_last_clause_of_a_stall_names_whom_it_blames(clause, blamed):
    assert named(f"{WAITED}{clause}{ENDS}") == blamed
    warning = f"{WAITED}{clause}; if that lasts, the job ends in 6 s\n"
    assert named(warning) == set()


def test_an_error_that_mentions_other_ranks_blames_its_own():
    cause = "ActionError: rank 1 failed; rank 0 sent it"
    assert named(f"ds_lgamp: rank 1 on {HOST} failed ({cause}); this rank, 0 on {HOST}, ends outside of a batch") == {1}


def test_a_dead_link_may_be_blamed_on_both_of_its_ends_alone():
    output = f"{WAITED}rank 1 has done its part, so the link between ranks 1 and 0 is down{ENDS}"
    end = End(1, 12.0, output, met=True)
    assert kinds(end, fault="dead link") == []
    assert WRONG in kinds(end._replace(output=output.replace("ranks 1 and 0", "ranks 1 and 2")), fault="dead link")


def test_a_checkpoint_that_does_not_load_is_lost_unless_the_fault_damaged_it(tmp_path):
    write_whole(tmp_path / "global_step3", example())
    assert list(judging.lost(tmp_path)) == []
    flip(next((tmp_path / "global_step3").glob("tensors-*/__0_0.distcp")), 100, 0)
    assert [complaint.kind for complaint in judging.lost(tmp_path)] == [LOST]
    assert list(judging.lost(tmp_path, damaged="global_step3")) == []
    (tmp_path / "global_step3" / STATE).unlink()
    assert list(judging.lost(tmp_path)) == [], "it is not published"


def test_a_loss_curve_has_every_step_and_the_known_losses():
    known = {}
    assert list(of_curve([(1, 0.5), (2, 0.4), (2, 0.4), (3, 0.3)], 3, known)) == []
    assert known == {1: 0.5, 2: 0.4, 3: 0.3}
    assert len(list(of_curve([(1, 0.5), (2, 0.41), (3, 0.3)], 3, known))) == 1
    assert len(list(of_curve([(1, 0.5), (3, 0.3)], 3, known))) == 1
    assert len(list(of_curve([(1, 0.5), (2, 0.4)], 3, known))) == 1


def test_the_jobs_of_a_seed_are_always_the_same_and_have_everything():
    first, second = ([random_job(draw) for _ in range(300)] for draw in (random.Random(3), random.Random(3)))
    assert first == second and first != [random_job(random.Random(4)) for _ in range(300)]
    assert {job.fault for job in first} == FAULTS.keys() and {job.door for job in first} == DOORS.keys()
    assert {job.place for job in first} == {place for fault in FAULTS.values() for place in fault.places}
    assert all(job.rank < job.ranks and job.other < job.ranks and job.other != job.rank for job in first)
    assert all(job.goes_on or job.place not in ("save", "load") for job in first)
    assert all(job.resumed.alike == job.alike for job in first)
    assert {job.resumed.ranks for job in first} == {1, 2, 3, 4}
    assert "exit" not in {random_job(random.Random(seed), without=["exit"]).fault for seed in range(100)}


def test_no_job_begins_that_may_take_longer_than_allowed(monkeypatch):
    now, took = [0.0], iter([50.0, 40.0, 60.0, 1.0])

    def told(job, curves):
        now[0] += next(took)
        return Judged(True, [])

    monkeypatch.setattr(running, "tell", told)
    monkeypatch.setattr(running.time, "monotonic", lambda: now[0])
    assert running.run(3.0, 1, "abc").minutes == 2.5, "the fourth job might take 60 s"


def test_a_fault_that_the_machine_does_not_allow_is_left_out_and_said(monkeypatch, capsys):
    def unavailable(*_):
        raise NetworkUnavailable("no network here")

    monkeypatch.setattr(running, "throttled_network", unavailable)
    monkeypatch.setattr(running, "tell", lambda job, curves: Judged(True, []))
    assert running.run(0.0, 1, "abc").left_out == {"dead link": "no network here"}
    assert "left out: dead link: no network here" in capsys.readouterr().out


def test_the_table_adds_up_all_recorded_runs(tmp_path):
    file = tmp_path / "chaos.json"
    add(Run("abc", 1, 2.0, {"SIGKILL": {"pipeline": 3, "plain": 1}, "pause": {"plain": 1}}, {}, {}), file)
    add(Run("def", 2, 3.4, {"SIGKILL": {"plain": 4}}, {"SIGKILL": {UNNAMED: 1, LATE: 2}}, {}), file)
    summary, *lines = page_block(file).splitlines()
    assert summary == (
        "9 jobs in 5 minutes; hangs: 0, lost checkpoints: 0; of 8 faults that must be named, 7 (87.5%) were blamed on "
        "the right rank and on no other."
    )
    assert "| SIGKILL | 3 | 5 | 0 | 0 | 7 of 8 | late: 2 |" in lines
    assert "| pause | 0 | 1 | 0 | 0 |  |  |" in lines


def test_a_process_that_a_job_leaves_is_found(tmp_path, monkeypatch):
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, OF: str(tmp_path)})
    try:
        started = _Started.__new__(_Started)
        started.folder, started.process = tmp_path, subprocess.Popen(["true"])
        started.process.wait()
        monkeypatch.setattr("testing.chaos.started.wait", lambda *_: None)
        assert started.left() == ("sleep 60",)
    finally:
        started.kill()
    assert child.wait() == -signal.SIGKILL


def test_the_time_for_which_a_process_had_no_core_is_measured():
    """Two busy processes share a core."""
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    try:
        starving = _Starving()
        deadline = time.monotonic() + 20
        while starving.seconds < 0.3 and time.monotonic() < deadline:
            starving.look([process.pid for process in busy])
            time.sleep(0.05)
        assert 0.3 <= starving.seconds < 20
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_a_disturbed_job_is_judged_and_goes_on(tmp_path):
    judged = judge(JOB, tmp_path, {})
    assert judged == Judged(True, []), judged
    assert len((tmp_path / "losses").read_text().splitlines()) >= 10


@pytest.mark.slow
def test_the_command_repeats_a_job():
    words = [sys.executable, "-m", "testing.chaos", "--job", json.dumps(JOB._replace(fault="pause")._asdict())]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("ok "), done.stdout
