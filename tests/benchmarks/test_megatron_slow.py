"""The benchmark of Megatron-core's loop over a slow network: its contenders, their equal training, and its report."""

from functools import partial

import pytest

from benchmarks import megatron_slow
from benchmarks.contenders import Contender, Layout
from benchmarks.contenders.megatron_loop import InLoop
from benchmarks.counting import Counted, Step, count
from benchmarks.megatron_slow import FSDP, SCHEDULES, STOCK, ZERO_STAGES, aim, contenders, in_loop, run
from benchmarks.model import ModelSize
from benchmarks.record import Record
from testing.namespaces import NetworkUnavailable

TINY = ModelSize(blocks=4, width=32, sequence=8, vocabulary=32)
OWN = [in_loop(stage) for stage in ZERO_STAGES]
PIPELINES = [f"{STOCK}, {schedule}" for schedule in SCHEDULES]


def test_all_train_on_as_many_ranks():
    members = contenders(TINY)
    assert {layout.pipeline_ranks * layout.data_ranks for layout in members} == {4}
    assert [[one.name for one in here] for here in members.values()] == [
        [*OWN, *PIPELINES],
        [*OWN, STOCK, FSDP],
    ]


def test_sharded_chunks_need_not_be_models_of_megatron_core():
    """They are plain modules here. ``count`` compares the losses with those of one process."""
    own = Contender(in_loop(3), partial(InLoop, zero_stage=3))
    assert list(count([own], Layout(1, 1, TINY), [2], repetitions=1)) == [in_loop(3)]


@pytest.mark.slow
@pytest.mark.parametrize("pipeline_ranks", [2, 1])
def test_everybody_trains_what_one_process_does_and_shards_hold_least(pipeline_ranks):
    """``count`` compares the losses with those of one process."""
    (found,) = (
        found for found in contenders(TINY._replace(blocks=8, width=64)).items() if found[0][0] == pipeline_ranks
    )
    layout, members = found
    micro_batches = 8 // layout.data_ranks
    counted = count(members, layout, [micro_batches], memory=True, repetitions=1)
    peaks = {
        name: max(step.peak_bytes for rank in on_ranks for step in rank.steps[micro_batches])
        for name, on_ranks in counted.items()
    }
    optimizers = [peak for name, peak in peaks.items() if name.startswith(STOCK)]
    assert peaks[in_loop(3)] < min(peaks[in_loop(1)], *optimizers)


def test_the_report_compares_with_the_peer_that_holds_as_much():
    record = Record("megatron_slow", {})
    pipelines = ((in_loop(1), 8, 2), (in_loop(3), 2, 3), (PIPELINES[0], 8, 5), (PIPELINES[1], 16, 4))
    without = ((in_loop(1), 8, 6), (in_loop(3), 2, 9), (STOCK, 8, 8), (FSDP, 1, 12))
    for ranks, found in ((2, pipelines), (1, without)):
        for name, peak, step in found:
            record.add(name, {"pipeline_ranks": ranks}, "peak", [peak], "bytes")
            record.add(name, {"pipeline_ranks": ranks}, "step", [step], "s")
    aim(record)
    assert [target.value for target in record.targets] == [0.25, 0.5, 0.25, 0.75, 0.75]
    assert PIPELINES[1] in record.targets[1].text and "1 x 4" in record.targets[4].text


def test_a_machine_without_namespaces_has_peaks_alone(monkeypatch, capsys):
    def no_network(nodes, rate):
        raise NetworkUnavailable(f"{nodes} nodes are too many")

    def pretend(members, layout, micro_batches, **_options):
        return {one.name: [Counted(steps={number: [Step([], 1)] for number in micro_batches})] for one in members}

    monkeypatch.setattr(megatron_slow, "throttled_network", no_network)
    monkeypatch.setattr(megatron_slow, "count", pretend)
    record = run(TINY)
    assert {row.metric for row in record.rows} == {"peak"} and len(record.rows) == 2 * len(OWN) + len(PIPELINES) + 2
    assert [target.text.split(" of ")[0] for target in record.targets] == ["peak", "peak"]
    assert record.machine["network"] == "no seconds at 200 Mbit/s: 4 nodes are too many"
    assert "no seconds" in capsys.readouterr().err
