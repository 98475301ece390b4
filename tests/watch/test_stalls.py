"""Ranks that stand still without dying: the others name them, and end. Real processes on gloo."""

import ctypes
import os
import re
import signal
import socket
import time
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from ds_lgamp.runtime.batch import BatchState
from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.placement import split_balanced
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.watch import this_rank as module
from ds_lgamp.watch.stalls import TICK
from ds_lgamp.watch.this_rank import this_rank
from testing.namespaces import NetworkUnavailable, address, throttled_network
from testing.ranks import started_ranks
from tests.runtime.assembly import assemble, build_grid
from tests.runtime.models import build_model, micro_batch
from tests.slow import slow_except

HOST = socket.gethostname()
LIMIT = 6.0
"""The ``hang_timeout`` of these tests, in seconds."""
MORE = 15
"""Seconds beyond the limit in which all ranks that can end have ended."""
HEALTHY = 2
"""How many steps go well."""
RANKS = 4
FOR_EVER = 1000


class Training:
    """Trains on 2 pipeline ranks and 2 data-parallel ranks: ranks 0 and 1 hold the chunks 0 and 2."""

    def __init__(self, folder):
        self.rank, self.folder, self.steps = dist.get_rank(), folder, 0
        os.dup2(os.open(folder / str(self.rank), os.O_CREAT | os.O_WRONLY), 2)
        this_rank.start()
        spec = ProgramSpec((0, 1, 0, 1), "layered", 4, 4, 3)
        grid, model = build_grid(2, 2), build_model(6, tied=False)
        bounds = split_balanced([1] * len(model.layers), spec.chunks)
        self.executor, partition, *_ = assemble(grid, spec, model, bounds, lambda: None)
        partition.release_all()
        self.program = build_program(spec)[grid.pipeline_rank]
        for _ in range(HEALTHY):
            self.step()
        dist.barrier()
        (folder / f"{self.rank} begins").write_text(str(os.getpid()))

    def step(self, load=micro_batch, before=lambda action: None):
        """One training step.

        Args:
            load: returns a micro-batch, from the step and its number.
            before: called ahead of every action.
        """
        self.steps += 1
        with this_rank.whereabouts.in_batch(self.executor, f"step {self.steps}", True, LIMIT):
            batch = BatchState(4, lambda index: load(self.steps, index), program=self.program)
            with self.executor.run_batch(batch):
                for action in self.program:
                    before(action)
                    self.executor.execute(action)


def waits_for_data(*_):
    time.sleep(FOR_EVER)


def stops(training):
    os.kill(os.getpid(), signal.SIGSTOP)


def has_no_data(training):
    training.step(load=waits_for_data)


def leaves_the_loop(training):
    time.sleep(FOR_EVER)


def says_goodbye(training):
    """As a script that ended, on a backend whose connections do not end with it."""
    this_rank.leave()
    time.sleep(FOR_EVER)


def holds_the_interpreter(training):
    # The timer still runs for the first batch, which may take longer.
    time.sleep(2 * TICK)
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    # A signal, such as the guard's, would end a sleep. It does not end the wait for a lock that nobody frees.
    for _ in range(2):
        library.pthread_mutex_lock(mutex)


FAULTS = {
    "stops": stops,
    "has no data": has_no_data,
    "leaves the loop": leaves_the_loop,
    "says goodbye": says_goodbye,
    "holds the interpreter": holds_the_interpreter,
}
SILENT = r"rank {rank}(, which would know why,)? does not answer since \d\d:\d\d:\d\d"
SAYS = {
    "stops": SILENT,
    "has no data": r"rank {rank} stands in F0.0( of step 3)? for \d+ s and waits for no rank",
    "leaves the loop": r"rank {rank} stands outside of a batch after step 2 for \d+ s and waits for no rank",
    "says goodbye": r"rank {rank} left at \d\d:\d\d:\d\d: its script or its default process group ended",
    "holds the interpreter": SILENT,
}
STACKS = {"has no data": "in waits_for_data", "leaves the loop": "in leaves_the_loop"}
"""By fault, a call of the culprit that is shown."""


def trains_with(folder, fault, culprit):
    training = Training(folder)
    if training.rank == culprit:
        FAULTS[fault](training)
    while True:
        training.step()


def wait_until_all_begin(folder):
    deadline = time.monotonic() + 120
    while len(list(folder.glob("* begins"))) < RANKS:
        assert time.monotonic() < deadline, written(folder)
        time.sleep(0.05)


def written(folder):
    return {rank: (folder / str(rank)).read_text() for rank in range(RANKS)}


def assert_end(folder, ranks, sentence, among):
    """Checks that the ranks ``among`` end in time, each with the ``sentence`` and with where it stood itself."""
    wait_until_all_begin(folder)
    deadline = time.monotonic() + LIMIT + MORE
    for rank in among:
        ranks[rank].join(max(0.0, deadline - time.monotonic()))
    texts = written(folder)
    assert {ranks[rank].exitcode for rank in among} == {1}, texts
    for rank in among:
        (last,) = [line for line in texts[rank].splitlines() if f"; this rank, {rank} on {HOST}, ends " in line]
        own = re.escape(f"; this rank, {rank} on {HOST}, ends ") + r"(in|at|between|where).* of step \d+"
        assert re.fullmatch(rf"ds_lgamp: rank \d has waited \d+ s .* of step \d+ for .*{sentence}{own}", last), texts
    return texts


CASES = [(fault, culprit) for fault in FAULTS for culprit in (3, 0)]


@pytest.mark.parametrize(
    ("fault", "culprit"),
    slow_except([("stops", 3)], CASES, several=True, slow=[case for case in CASES if case[1] == 3]),
)
def test_a_rank_that_stands_still_is_named_and_the_others_end(fault, culprit, tmp_path):
    if (fault, culprit) == ("has no data", 3):
        pytest.skip("rank 3 reads its data in its last chunk")
    with started_ranks(RANKS, trains_with, tmp_path, fault, culprit) as (ranks, _):
        others = [rank for rank in range(RANKS) if rank != culprit]
        texts = assert_end(tmp_path, ranks, SAYS[fault].format(rank=culprit), others)
        if fault in STACKS:
            assert any(STACKS[fault] in text for text in texts.values()), texts
        if fault == "holds the interpreter":
            # Its threads cannot even see that the others ended. Its guard ends it, and shows its calls.
            ranks[culprit].join(LIMIT + MORE)
            assert ranks[culprit].exitcode == -signal.SIGKILL
            assert "in holds_the_interpreter" in (tmp_path / str(culprit)).read_text()


PAUSE = 3.0
"""Seconds before each action of a slow rank. It has many of them in the time that the others wait in one."""


def is_slow_and_then_pauses(folder):
    """Rank 3 is slow for a step. In the next one it is stopped, and goes on before it is too late."""
    training = Training(folder)
    slow = lambda action: time.sleep(PAUSE) if action.kind in (Kind.FORWARD, Kind.BACKWARD) else None  # noqa: E731
    training.step(before=slow if training.rank == 3 else lambda action: None)
    if training.rank == 3:
        (folder / "stops").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    training.step()
    # Nobody judges a rank between batches, where the others wait for it.
    time.sleep(2 * LIMIT if training.rank == 3 else 0)
    dist.barrier()
    training.step()
    (folder / f"{training.rank} is done").touch()


@pytest.mark.slow
def test_a_rank_that_is_slow_or_stops_for_a_while_ends_nobody(tmp_path):
    with started_ranks(RANKS, is_slow_and_then_pauses, tmp_path) as (ranks, _):
        wait_until_all_begin(tmp_path)
        deadline = time.monotonic() + 150
        while not (tmp_path / "stops").exists():
            assert time.monotonic() < deadline and ranks[3].exitcode is None, written(tmp_path)
            time.sleep(0.05)
        time.sleep(LIMIT / 2)
        os.kill(ranks[3].pid, signal.SIGCONT)
        while len(list(tmp_path.glob("* is done"))) < RANKS:
            assert time.monotonic() < deadline and all(rank.exitcode is None for rank in ranks), written(tmp_path)
            time.sleep(0.05)
        # Before the block kills them one by one: the rest would say so.
        texts = written(tmp_path)
    assert not any(", ends " in text for text in texts.values()), texts
    warnings = [line for line in texts[0].splitlines() if "if that lasts, the job ends in" in line]
    assert warnings, texts


class Enter:
    """Moves a rank into a machine of its own in a network."""

    def __init__(self, network):
        self.network = network

    def __call__(self, rank):
        self.network.enter(rank)
        module.own_address = lambda store: address(rank)


def keeps_training(folder):
    training = Training(folder)
    while True:
        training.step(before=lambda action: time.sleep(0.01))


@pytest.mark.slow
def test_a_link_that_drops_everything_is_named(tmp_path):
    with ExitStack() as stack:
        try:
            network = stack.enter_context(throttled_network(RANKS, "1gbit"))
        except NetworkUnavailable as reason:
            pytest.skip(str(reason))
        ranks, _ = stack.enter_context(started_ranks(RANKS, keeps_training, tmp_path, before_init=Enter(network)))
        wait_until_all_begin(tmp_path)
        network.cut(1, 3)
        down = "so the link between ranks (1 and 3|3 and 1) is down"
        assert_end(tmp_path, ranks, down, range(RANKS))
