"""The schedule benchmark: how it counts work, its network, and one measurement."""

import os
import signal
import subprocess
import sys
from statistics import median

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.record import ROOT
from benchmarks.schedule import LIMIT, LOOPBACK, RATIO, run
from benchmarks.virtual.bubbles import SLOW, simulated
from benchmarks.virtual.chunk import Setting, check_work, weight_of
from benchmarks.virtual.pipelines import BARE_LOOP, CONTENDERS, LAYERED, Contender, Executed
from benchmarks.virtual.steps import measure
from ds_lgamp.schedule.actions import Action, Kind, send_of
from ds_lgamp.schedule.simulate import simulate
from testing.namespaces import SOCKET_QUEUE, NetworkUnavailable, throttled_network
from testing.processes import is_alive, wait

TINY = Setting(2, 1, 2, forward=0.001, backward=0.002)
TINY_LOOPED = TINY._replace(chunks_per_rank=2)


def test_every_contender_does_the_work_and_gets_its_rows():
    record = run([TINY, TINY_LOOPED], [], repetitions=2)
    names = {setting: [entry.name for entry in CONTENDERS if entry.suits(setting)] for setting in (TINY, TINY_LOOPED)}
    assert "DeepSpeed 1F1B" in names[TINY] and "torch Interleaved1F1B" in names[TINY_LOOPED]
    for setting, expected in names.items():
        config = {"pipeline_ranks": 2, "chunks_per_rank": setting.chunks_per_rank, "micro_batches": 2, "link": LOOPBACK}
        rows = [row for row in record.rows if row.config == config]
        assert [row.contender for row in rows if row.metric == RATIO] == expected
        assert {row.metric for row in rows if row.contender == LAYERED.name} == {RATIO, "bubble", "simulated bubble"}
        # Sleeps last at least as long as requested, so no step is faster than simulated.
        assert all(row.median > 1 for row in rows if row.metric == RATIO)
    (target,) = record.targets
    largest = max(row.median for row in record.rows if (row.contender, row.metric) == (LAYERED.name, RATIO))
    assert target.value == pytest.approx(largest) and target.limit == LIMIT and target.met == (target.value <= LIMIT)
    assert record.machine["scheduling"] in ("real-time (SCHED_RR)", "time-sharing")


def test_rows_of_the_slow_link_or_the_reason_why_there_are_none(capsys):
    setting = TINY._replace(elements=1 << 18)
    record = run([], [setting], [LAYERED], repetitions=1)
    if "network" in record.machine:
        assert not record.rows and not record.targets
        assert f"nothing measured at {SLOW}" in capsys.readouterr().err
    else:
        (hop,) = [row for row in record.rows if row.metric == "hop"]
        # One megabyte at 1 Gbit/s, minus the bytes that the throttle lets pass at once.
        assert hop.config["link"] == SLOW and hop.median > ((1 << 20) - (128 << 10)) * 8 / 1e9 * 1000
        (target,) = record.targets
        assert SLOW in target.text


def one_micro_batch(setting):
    return Executed(setting._replace(micro_batches=1), "layered")


def test_a_contender_that_computes_something_else_fails_the_run():
    wrong = Contender("too short", "layered", one_micro_batch)
    with pytest.raises(AssertionError, match="too short: loss"):
        measure([TINY], [LAYERED, wrong], repetitions=1)


def test_loss_and_gradients_are_compared_with_the_definition():
    setting = Setting(2, 2, 4)
    gradients = [(chunk, setting.loss / weight_of(chunk)) for chunk in range(4)]
    check_work("right", setting, [setting.loss], gradients)
    with pytest.raises(AssertionError, match="gradient 0.5 instead of .* at chunk 0"):
        check_work("wrong", setting, [setting.loss], [(0, 0.5), *gradients[1:]])
    with pytest.raises(AssertionError, match="loss 1.0 instead of"):
        check_work("wrong", setting, [1.0], gradients)


@pytest.fixture
def rank_of_four():
    """Makes this process rank 0 of four ranks that do not exist."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("micro_batches", [4, 8])
@pytest.mark.parametrize("name", ["torch LoopedBFS", "torch Interleaved1F1B"])
def test_orders_of_torch_take_the_simulated_time_of_ours(rank_of_four, name, micro_batches):
    (contender,) = [entry for entry in CONTENDERS if entry.name == name]
    setting = Setting(4, 3, micro_batches)
    spec = contender.spec(setting)
    order = contender.build(setting).schedule.pipeline_order
    program = [[action for slot in order[rank] for action in as_ours(spec, slot)] for rank in order]
    for hop in (0.0, 0.008):
        theirs = simulate(spec, program, setting.durations(hop)).step_time
        assert theirs == pytest.approx(simulated(contender, setting, hop).step_time)


def as_ours(spec, slot):
    """Converts an action of torch's order: a compute and its send, or nothing for an empty slot."""
    if slot is None:
        return []
    kind = {"F": Kind.FORWARD, "B": Kind.BACKWARD}[slot.computation_type.value]
    compute = Action(kind, slot.stage_index, slot.microbatch_index)
    return [compute, send_of(compute)] if spec.sends_output(compute) else [compute]


@pytest.fixture
def permitted():
    try:
        with throttled_network(1, "1gbit"):
            pass
    except NetworkUnavailable as reason:
        pytest.skip(f"no network namespaces: {reason}")


def interfaces():
    return sorted(os.listdir("/sys/class/net"))


def test_queues_of_sockets_are_as_short_as_asked(permitted):
    with throttled_network(1, "1gbit", socket_queue=1 << 17) as network:
        inside = ["nsenter", f"--net=/proc/{network.holders[0]}/ns/net", "cat", f"/proc/sys/net/ipv4/{SOCKET_QUEUE}"]
        assert int(subprocess.check_output(inside)) == 1 << 17


def test_nothing_of_a_network_is_left_after_an_error(permitted):
    before = interfaces()
    with pytest.raises(ZeroDivisionError), throttled_network(2, "1gbit") as network:
        namespaces = {os.readlink(f"/proc/{holder}/ns/net") for holder in network.holders}
        assert len(namespaces | {os.readlink("/proc/self/ns/net")}) == 3
        raise ZeroDivisionError
    assert interfaces() == before
    assert not any(map(is_alive, network.holders))


def test_nothing_of_a_network_is_left_when_it_cannot_be_made(permitted):
    with pytest.raises(NetworkUnavailable, match="tc qdisc add"), throttled_network(1, "no rate"):
        pass
    children = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "comm="], capture_output=True, text=True)
    assert "cat" not in children.stdout.split()


def test_nothing_of_a_network_is_left_by_a_process_that_is_killed(permitted):
    script = (
        "import time; from testing.namespaces import throttled_network\n"
        "with throttled_network(2, '1gbit') as network: print(*network.holders, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        holders = [int(number) for number in process.stdout.readline().split()]
        process.send_signal(signal.SIGKILL)
    assert len(holders) == 2
    wait(lambda: not any(map(is_alive, holders)), 10)
    assert not any(map(is_alive, holders))


@pytest.mark.timing
def test_a_layered_step_takes_little_longer_than_on_paper():
    """Takes turns with the bare loop, which shows how late sleeps and messages of this machine are just now. Tries
    three times, because the machine may be busy. A lost overlap would exceed the limit every time."""
    setting = Setting(4, 2, 8, forward=0.02, backward=0.04)
    paper = simulated(LAYERED, setting).step_time
    ratios = []
    while len(ratios) < 3 and not (ratios and ratios[-1] <= 1.05):
        (seconds,) = measure([setting], [LAYERED, BARE_LOOP], repetitions=3).seconds
        floor = max(paper, median(seconds[BARE_LOOP.name]))
        ratios.append(median(seconds[LAYERED.name]) / floor)
    assert ratios[-1] <= 1.05, ratios
