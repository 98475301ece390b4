"""The benchmark of BERT on nodes behind slow Ethernet: its contenders, its efficiency and the planner's."""

import time

import pytest

from benchmarks.bert import ALONE, DDP, EFFICIENCY, HOSTS, PREDICTED, REAL, contenders, enter, measure, predicted
from benchmarks.contenders.bert import BACKWARD, FORWARD, batch_of, bert, virtual_bert
from benchmarks.model import ModelSize
from benchmarks.record import OURS, Record
from benchmarks.training import Duration

TINY = ModelSize(blocks=4, width=32, sequence=16, vocabulary=32)
NAMES = [contender.name for contender in contenders(2)]


@pytest.mark.slow
@pytest.mark.parametrize("compute", HOSTS)
def test_everybody_trains_what_one_process_does(compute):
    found = measure(TINY, micro_batches=2, repetitions=2, host=HOSTS[compute])
    assert list(found) == NAMES
    assert all(len(each) == 2 for each in found.values())


def test_a_virtual_block_takes_its_seconds_and_computes_what_a_real_one_does():
    models, seconds = (virtual_bert(TINY), bert(TINY)), []
    for model in models:
        begin = time.monotonic()
        loss = model(**batch_of(TINY, 0, 0)).loss
        middle = time.monotonic()
        loss.backward()
        seconds.append((middle - begin, time.monotonic() - middle))
    virtual, real = ([parameter.grad for parameter in model.parameters()] for model in models)
    assert all(mine.equal(other) for mine, other in zip(virtual, real, strict=True))
    assert seconds[0][0] >= TINY.blocks * FORWARD and seconds[0][1] >= TINY.blocks * BACKWARD


def test_efficiency_is_the_step_without_a_network_over_the_step_with_one():
    record = Record("bert", {})
    steps = {name: 4.0 + number for number, name in enumerate(NAMES)}
    enter(record, REAL, TINY, 8, {name: [Duration(seconds, 1.0)] * 3 for name, seconds in steps.items()})
    reached = {row.contender: row.median for row in record.rows if row.metric == EFFICIENCY}
    assert reached == {name: 4.0 / seconds for name, seconds in steps.items() if name != ALONE}
    cost, behind = (target.value for target in record.targets)
    assert cost == pytest.approx(1 - max(reached[name] for name in NAMES if name.startswith(OURS)))
    assert behind > 1 and not any(target.met for target in record.targets)


def test_the_planner_hides_of_the_network_what_compute_can_hide():
    slow, fast = predicted(TINY, 8, compute=1e-4), predicted(TINY, 8, compute=1e4)
    assert slow.keys() == fast.keys() == set(NAMES) - {ALONE}
    assert all(efficiency < 0.01 for efficiency in slow.values())
    assert all(efficiency == pytest.approx(1.0, abs=1e-4) for efficiency in fast.values())
    between = predicted(TINY, 8, compute=0.1)
    assert between[f"{OURS}, ZeRO-1"] > between[DDP] > between["DeepSpeed ZeRO-1"] > between["DeepSpeed ZeRO-2"]


def test_the_planners_figures_stand_beside_the_measured_ones():
    record = Record("bert", {})
    enter(record, REAL, TINY, 8, {name: [Duration(1.0, 1.0)] for name in NAMES})
    assert {row.contender for row in record.rows if row.metric == PREDICTED} == set(NAMES) - {ALONE}
