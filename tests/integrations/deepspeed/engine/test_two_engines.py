"""Two engines of one process train in turn. What is watched and said of one has nothing of the other."""

import gc
import os
import re
import socket
import time
from itertools import groupby

import pytest
import torch.distributed as dist

import ds_lgamp
from ds_lgamp.schedule.actions import COMPUTE, Kind
from ds_lgamp.schedule.program import build_program
from ds_lgamp.view.recording import read_recording
from ds_lgamp.watch.this_rank import this_rank
from testing.deepspeed_rank import prepare_rank
from testing.ranks import started_ranks
from tests.integrations.deepspeed.engine.tensor_reading import engine_of
from tests.integrations.deepspeed.running import batches

pytestmark = pytest.mark.slow
HOST = socket.gethostname()
LIMIT, PATIENT, MORE = 4.0, 300.0, 20.0
"""The ``hang_timeout`` of the first engine and of the second; seconds beyond the first in which a rank ends."""


def train_in_turn(folder):
    """The second engine ends. Then rank 1 stands still in a batch of the first."""
    rank = dist.get_rank()
    os.dup2(os.open(folder / str(rank), os.O_CREAT | os.O_WRONLY), 2)
    ds_lgamp.install()
    prepare_rank()
    first, second = (
        engine_of(2, 1, block={"hang_timeout": limit, "trace": str(folder / name), "trace_steps": "1:2"})
        for name, limit in (("first", LIMIT), ("second", PATIENT))
    )
    for step in range(2):
        for engine in (first, second, second):
            engine.train_batch(batches(step, engine))
    waits_in_a_batch(second, LIMIT + 2 if rank == 1 else 0.0)
    second.save_checkpoint(str(folder / "saved"))
    found = [len(this_rank.engines), len(this_rank.savers)]
    second.destroy()
    del engine, second
    gc.collect()
    found += [len(this_rank.engines), len(this_rank.savers), this_rank.lifeline is not None]
    (folder / f"{rank} found").write_text(repr(found))
    dist.barrier()
    waits_in_a_batch(first, 1000.0 if rank == 1 else 0.0)


def waits_in_a_batch(engine, seconds):
    """Trains a step. Waits before the first forward of it."""
    stock = engine.lgamp.executor.execute

    def execute(action):
        if action.kind is Kind.FORWARD and not waited:
            waited.append(action)
            time.sleep(seconds)
        stock(action)

    waited = []
    engine.lgamp.executor.execute = execute
    engine.train_batch(batches(3, engine))
    engine.lgamp.executor.execute = stock


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    with started_ranks(2, train_in_turn, folder) as (ranks, _):
        deadline = time.monotonic() + 180
        while len(list(folder.glob("* found"))) < 2 and not any(rank.exitcode for rank in ranks):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ranks[0].join(LIMIT + MORE)
        (folder / "status").write_text(str(ranks[0].exitcode))
    return folder


def test_one_of_two_engines_ends_and_the_other_is_watched_as_before(folder):
    for rank in range(2):
        assert (folder / f"{rank} found").read_text() == "[2, 1, 1, 0, True]"
    said = (folder / "0").read_text()
    assert (folder / "status").read_text() == "1", said
    # The first engine's step and limit: the second one has made more steps, and waits for longer.
    (last,) = [line for line in said.splitlines() if f"; this rank, 0 on {HOST}, ends " in line]
    told = r"ds_lgamp: rank 0 has waited (\d+) s .* of step 3 for .*; rank 1 stands in \S+ for \d+ s and waits"
    found = re.match(told, last)
    assert found and LIMIT <= int(found[1]) < LIMIT + MORE and last.endswith(" of step 3"), last


def test_each_of_two_engines_records_its_own_steps(folder):
    for name in ("first", "second"):
        recording = read_recording(folder / name)
        programs = build_program(recording.program_spec())
        for rank in recording.ranks:
            computes = [str(each) for each in programs[rank.pipeline_rank] if each.kind in (*COMPUTE, Kind.STEP)]
            assert [step.step for step in rank.steps] == [1, 2]
            for step in rank.steps:
                # The recomputation of a backward is an interval of its own.
                lane = [key for key, _ in groupby(each.name for each in step.intervals if each.lane == "compute")]
                assert lane == computes
