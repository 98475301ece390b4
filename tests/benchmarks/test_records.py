"""Recorded runs and their files. A small subset asserts the benchmarks' counts exactly."""

import json
import os
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from benchmarks import IN_PARTS, NAMES, ON_ACCELERATOR, divided_experts, islands, unlike
from benchmarks.__main__ import main
from benchmarks.communication import compare, count_deviations, predicted
from benchmarks.communication import run as run_communication
from benchmarks.contenders import Contender, Layout
from benchmarks.contenders.fsdp import Accumulation
from benchmarks.contenders.lgamp import Layered
from benchmarks.counting import Counted, Step, check_losses
from benchmarks.memory import run as run_memory
from benchmarks.model import ModelSize, reference_losses
from benchmarks.record import (
    BELOW_FLOOR,
    IN_SPREAD,
    MET,
    MISSED,
    OURS,
    PART,
    PARTS,
    RESULTS,
    TYPICAL,
    Record,
    finish,
    is_recorded,
    machine,
    read,
)
from testing.forks import run_module
from tests.slow import slow_except


@pytest.mark.parametrize("name", [name for name in NAMES if name != ON_ACCELERATOR or is_recorded(name)])
def test_a_recorded_run_has_rows_targets_and_the_machine(name):
    content = json.loads((RESULTS / f"{name}.json").read_text())
    keys = ["name", "machine", "rows", "targets"]
    assert list(content) in (keys, [*keys, "failures"]) and content["name"] == name
    assert {"cores", "python", "torch", "deepspeed", "load_before", "load_after"} <= set(content["machine"])
    for row in content["rows"]:
        assert list(row) == ["contender", "config", "metric", "median", "spread", "unit"] and row["spread"] >= 0
    for target in content["targets"]:
        assert list(target) == ["text", "value", "limit", "floor", "spread"] and target["spread"] >= 0
    # These compare modes of ds_lgamp, or plans, and have no target.
    assert content["rows"] and (content["targets"] or name in ("gathers", "updates", "one_machine"))


def test_a_record_survives_its_file(results):
    record = Record("sample", machine())
    record.add("ds_lgamp", {"micro_batches": 4}, "time", [3.0, 1.0, 2.0], "seconds")
    record.aim("time", 2.0, 1.5)
    record.fail("peer", {"micro_batches": 4}, "out of memory")
    finish(record)
    again = read("sample")
    assert again == record and "load_after" in again.machine
    assert (again.rows[0].median, again.rows[0].spread, again.targets[0].verdict) == (2.0, 2.0, MISSED)


def test_a_target_is_met_or_missed_or_beyond_its_floor_or_its_spread():
    record = Record("sample", {})
    record.compare("met", [1.0, 2.0, 3.0], [2.0, 2.0, 2.0], 1.0, floor=0.9)
    record.compare("missed", [3.0, 3.1, 3.2], [2.0, 2.0, 2.0], 1.0, floor=1.0)
    record.compare("floor", [3.0, 3.1, 3.2], [2.0, 2.0, 2.0], 1.0, floor=1.1)
    # Rounds differ in load, but their quotients do not.
    record.compare("missed, under any load", [3.0, 6.0, 9.0], [2.0, 4.0, 6.0], 1.4)
    record.compare("spread", [1.5, 3.0, 3.0], [2.0, 2.0, 2.0], 1.2)
    record.aim("not a number", float("nan"), 1.0)
    assert [target.verdict for target in record.targets] == [MET, MISSED, BELOW_FLOOR, MISSED, IN_SPREAD, MISSED]
    assert [target.spread for target in record.targets] == pytest.approx([0.5, 0.05, 0.05, 0.0, 0.375, 0.0])


def test_a_part_takes_its_own_place_and_leaves_the_others(results):
    def measured(part, seconds):
        record = Record("unlike", machine())
        record.add("ds_lgamp", {PART: part}, "step", [seconds], "s")
        record.aim(f"{part}: step", seconds, 2.0)
        record.fail("peer", {PART: part}, "out of memory")
        finish(record, part)

    for part, seconds in (("one", 1.0), ("two", 2.0), ("one", 3.0)):
        measured(part, seconds)
    again = read("unlike")
    assert {row.config[PART]: row.median for row in again.rows} == {"two": 2.0, "one": 3.0}
    assert [target.verdict for target in again.targets] == [MET, MISSED] and len(again.failures) == 2
    assert list(again.machine[PARTS]) == ["two", "one"] and "commit" in again.machine[PARTS]["two"]


def test_the_parts_of_a_benchmark_are_those_that_it_measures():
    for name, benchmark in {"unlike": unlike, "islands": islands}.items():
        assert IN_PARTS[name] == tuple(place.part for place in benchmark.PLACES)
    assert IN_PARTS[divided_experts.NAME] == (divided_experts.COUNTS, *divided_experts.TIMED)


def test_a_machine_without_git_and_sh_is_described_too(monkeypatch):
    monkeypatch.setenv("PATH", "")
    found = machine()
    assert found["commit"] == "unknown" and found["processor"] and found["torch"]


def test_losses_that_differ_fail_a_run():
    losses = reference_losses(ModelSize(blocks=2, width=32), data_ranks=1, steps=(1, 2))
    check_losses("equal", [losses[0], None], losses)
    with pytest.raises(AssertionError, match="other: loss .* in step 1, one process has"):
        check_losses("other", [losses[0], losses[1] * 1.0001], losses)
    with pytest.raises(AssertionError, match="other"):
        check_losses("other", [losses[0], float("nan")], losses)


@pytest.mark.parametrize("ranks", slow_except([], [(1, 2), (2, 2)], slow=[(2, 2)]))
def test_what_is_sent_is_what_the_formula_says_and_no_peer_sends_less(ranks):
    # This width needs no padding between parameters or between parts.
    record = run_communication(ModelSize(blocks=4, width=64), [ranks], micro_batches=(4,), repetitions=2)
    assert [target.text for target in record.targets if target.value and "formula" in target.text] == []
    assert [target.text for target in record.targets if target.value and "send less" in target.text] == []
    assert {row.spread for row in record.rows} == {0}


def test_counts_that_differ_from_the_formula_are_counted():
    layout = Layout(1, 2, ModelSize(blocks=4, width=32))
    right = predicted(layout, 0, 4, zero_stage=3, resident_chunks=2)
    shard = right.collective_bytes // (right.gathers + right.reductions)
    log = [("all_gather", shard)] * right.gathers + [("all_to_all", shard)] * right.reductions + [("all_reduce", 8)]
    counted = Counted(steps={4: [Step(log, 0)]}, held={4: 2})
    assert count_deviations([counted], layout, 3, 2) == 0
    assert count_deviations([counted], layout, 3, 1) == 3, "gathers, bytes and chunks held"


def peer_record(sent, held):
    record = Record("communication", {})
    for name, amount, chunks in ((f"{OURS}, ZeRO-3, 1 resident", 15, 1), (TYPICAL, 14, 2), ("peer", sent, held)):
        record.add(name, {"micro_batches": 4}, "collective_bytes", [amount], "bytes")
        record.add(name, {"micro_batches": 4}, "held", [chunks], "chunks")
    compare(record)
    return [target.value for target in record.targets]


@pytest.mark.parametrize(
    ("sent", "held", "less"), [(15, 1, 0), (16, 1, 0), (14, 1, 1), (15, 2, 0), (14, 3, 0), (13, 3, 1)]
)
def test_a_peer_is_compared_with_ours_that_holds_no_more(sent, held, less):
    assert peer_record(sent, held) == [less]


def test_memory_has_rows_of_all_and_the_formula_of_ours(monkeypatch):
    chosen = {(3, 2): Contender(TYPICAL, partial(Layered, zero_stage=3, resident_chunks=2))}
    monkeypatch.setattr("benchmarks.memory.ours", lambda layout: chosen)
    monkeypatch.setattr("benchmarks.memory.peers", lambda layout: [Contender("FSDP2", Accumulation)])
    record = run_memory(ModelSize(blocks=3, width=64), [(1, 2)], (2,), repetitions=1)
    rows = {(row.contender, row.metric): row.median for row in record.rows}
    assert rows.keys() == {(TYPICAL, "peak"), ("FSDP2", "peak"), (TYPICAL, "formula")}
    (target,) = record.targets
    assert target.value == pytest.approx(abs(rows[TYPICAL, "peak"] / rows[TYPICAL, "formula"] - 1), rel=0.5)


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.record.RESULTS", tmp_path)
    return tmp_path


def test_a_missing_record_names_the_command_that_makes_it(results):
    with pytest.raises(SystemExit, match="memory.json is missing; make it with python -m benchmarks run memory"):
        read("memory")


@pytest.mark.parametrize(("word", "status"), [("--help", 0), ("nonsense", 2)])
def test_the_command_line_lists_the_benchmarks(word, status):
    ended = run_module(["benchmarks", "run", word])
    assert ended.status == status
    assert all(name in ended.output + ended.complaints for name in NAMES)


def test_with_json_stdout_is_the_record_whatever_others_write(results, monkeypatch, capfd):
    def run():
        os.write(1, b"a framework's word")
        record = Record("growth", {})
        record.add("ds_lgamp", {}, "time", [1.0], "seconds")
        return record

    monkeypatch.setitem(sys.modules, "benchmarks.growth", SimpleNamespace(run=run))
    for words in (["--json"], []):
        monkeypatch.setattr(sys, "argv", ["benchmarks", "run", "growth", *words])
        main()
        captured = capfd.readouterr()
        assert "a framework's word" in captured.err
        if words:
            assert captured.out.strip() == (results / "growth.json").read_text().strip()
        else:
            assert captured.out.splitlines()[1].split() == ["ds_lgamp", "time", "1", "0", "seconds"]
