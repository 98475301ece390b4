"""The benchmark of Megatron-core's loop over a slow network: its contenders, their equal training, and its report."""

import pytest

from benchmarks import megatron_slow
from benchmarks.counting import Counted, Step, count
from benchmarks.megatron_slow import FSDP, STOCK, ZERO_STAGES, aim, contenders, in_loop, run
from benchmarks.model import ModelSize
from benchmarks.record import Record
from testing.namespaces import NetworkUnavailable

TINY = ModelSize(blocks=4, width=32, sequence=8, vocabulary=32)
OWN = [in_loop(stage) for stage in ZERO_STAGES]


def test_all_train_on_as_many_ranks():
    members = contenders(TINY)
    assert {layout.pipeline_ranks * layout.data_ranks for layout in members} == {4}
    assert [[one.name for one in here] for here in members.values()] == [[*OWN, STOCK], [FSDP]]


@pytest.mark.slow
def test_everybody_trains_what_one_process_does_and_shards_hold_least():
    """``count`` compares the losses with those of one process."""
    peaks = {}
    for layout, members in contenders(TINY._replace(blocks=8, width=64)).items():
        micro_batches = 8 // layout.data_ranks
        for name, on_ranks in count(members, layout, [micro_batches], memory=True, repetitions=1).items():
            peaks[name] = max(step.peak_bytes for counted in on_ranks for step in counted.steps[micro_batches])
    assert list(peaks) == [*OWN, STOCK, FSDP]
    assert min(peaks[name] for name in (*OWN, STOCK)) == peaks[in_loop(3)] < peaks[STOCK]


def test_the_report_compares_with_the_peer_that_holds_as_much():
    record = Record("megatron_slow", {})
    for name, peak, step in ((in_loop(1), 8, 2), (in_loop(3), 2, 3), (STOCK, 8, 4), (FSDP, 1, 12)):
        record.add(name, {}, "peak", [peak], "bytes")
        record.add(name, {}, "step", [step], "s")
    aim(record)
    assert [target.value for target in record.targets] == [0.25, 0.5, 0.25]


def test_a_machine_without_namespaces_has_peaks_alone(monkeypatch, capsys):
    def no_network(nodes, rate):
        raise NetworkUnavailable(f"{nodes} nodes are too many")

    def pretend(members, layout, micro_batches, **_options):
        return {one.name: [Counted(steps={number: [Step([], 1)] for number in micro_batches})] for one in members}

    monkeypatch.setattr(megatron_slow, "throttled_network", no_network)
    monkeypatch.setattr(megatron_slow, "count", pretend)
    record = run(TINY)
    assert {row.metric for row in record.rows} == {"peak"} and len(record.rows) == len(OWN) + 2
    assert [target.text.split(" of ")[0] for target in record.targets] == ["peak"]
    assert record.machine["network"] == "no seconds at 200 Mbit/s: 4 nodes are too many"
    assert "no seconds" in capsys.readouterr().err
