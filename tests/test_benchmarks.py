"""What is recorded and what the pages show of it; the benchmarks' counts, on a small subset, as exact assertions."""

import json
import subprocess
import sys

import pytest

from benchmarks import NAMES, plots
from benchmarks.communication import run as run_communication
from benchmarks.counting import check_losses
from benchmarks.model import ModelSize, reference_losses
from benchmarks.programs import run as run_programs
from benchmarks.record import RESULTS, ROOT, Record, machine, read
from benchmarks.report import BLOCKS, with_blocks


@pytest.mark.parametrize("page", BLOCKS)
def test_a_page_shows_what_is_recorded(page):
    text = (ROOT / page).read_text()
    assert with_blocks(page, text) == text, "run python -m benchmarks report"


@pytest.mark.parametrize("name", plots.PLOTS)
def test_a_plot_shows_what_is_recorded(name):
    assert plots.digest(name) in plots.path_of(name).read_text(), "run python -m benchmarks report"


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_run_has_rows_targets_and_the_machine(name):
    content = json.loads((RESULTS / f"{name}.json").read_text())
    assert list(content) == ["name", "machine", "rows", "targets"] and content["name"] == name
    assert {"cores", "python", "torch", "deepspeed", "load_before", "load_after"} <= set(content["machine"])
    for row in content["rows"]:
        assert list(row) == ["contender", "config", "metric", "median", "spread", "unit"] and row["spread"] >= 0
    for target in content["targets"]:
        assert list(target) == ["text", "value", "limit", "met"]
        assert target["met"] == (target["value"] <= target["limit"])
    assert content["rows"] and content["targets"]


def test_a_record_survives_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.record.RESULTS", tmp_path)
    record = Record("sample", machine())
    record.add("ds_lgamp", {"micro_batches": 4}, "time", [3.0, 1.0, 2.0], "seconds")
    record.aim("time", 2.0, 1.5)
    (tmp_path / "sample.json").write_text(record.to_json())
    again = read("sample")
    assert again == record
    assert (again.rows[0].median, again.rows[0].spread, again.targets[0].met) == (2.0, 2.0, False)


def test_losses_that_differ_fail_a_run():
    losses = reference_losses(ModelSize(blocks=2, width=32), data_ranks=1, steps=(1, 2))
    check_losses("equal", [losses[0], None], losses)
    with pytest.raises(AssertionError, match="other: loss .* in step 1, one process has"):
        check_losses("other", [losses[0], losses[1] * 1.0001], losses)
    with pytest.raises(AssertionError, match="other"):
        check_losses("other", [losses[0], float("nan")], losses)


@pytest.mark.parametrize("ranks", [(1, 2), (2, 2)])
def test_what_is_sent_is_what_the_formula_says_and_less_than_peers_send(ranks):
    record = run_communication(ModelSize(blocks=4, width=32), [ranks], micro_batches=(2, 4), repetitions=1)
    assert [target for target in record.targets if not target.met] == []
    assert {row.spread for row in record.rows} == {0}


def test_programs_are_timed():
    record = run_programs(ranks=4, chunks_per_rank=2, micro_batches=8, repetitions=2)
    assert [row.metric for row in record.rows] == ["build one rank", "validate all ranks"]
    assert all(target.met for target in record.targets)


def test_the_command_line_lists_the_benchmarks():
    shown = subprocess.run(
        [sys.executable, "-m", "benchmarks", "run", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert all(name in shown.stdout for name in NAMES)
