"""``python -m benchmarks gpu-day``: its dry run on the CPU, and how it resumes, fails and ends with stand-in parts."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.__main__ import main
from benchmarks.gpu_day import PARTS, Part, command, runner, trace
from benchmarks.gpu_day.runner import FAILED, NOT_RUN, PASSED, as_table, run_parts
from benchmarks.gpu_day.trials import TRIALS
from benchmarks.record import OURS
from testing import ROOT
from testing.processes import is_alive, wait

# Importing torch and DeepSpeed takes each part seconds, only to name the device.
WITHOUT_A_DEVICE = """
import sys, types
sys.modules["benchmarks.gpu_day.environment"] = types.SimpleNamespace(device_and_nccl=dict)
"""


@pytest.fixture
def day(tmp_path, monkeypatch):
    """Returns a function that writes a stand-in part, and the folder of the results."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITHOUT_A_DEVICE)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")

    def part(name, *lines, seconds=60):
        body = ["import os, sys, time", "def run(out):", *(f"    {line}" for line in lines)]
        (folder / f"{name}.py").write_text("\n".join(body))
        return Part(name, seconds)

    return part, tmp_path / "out"


def report_of(out, part):
    return json.loads((out / f"{part.name}.json").read_text())


def times_run(out, part):
    path = out / f"{part.name}.times"
    return len(path.read_text()) if path.exists() else 0


def counting(part, name, *lines):
    """A part that writes a letter whenever it runs."""
    return part(name, f"(out / '{name}.times').open('a').write('x')", *lines)


def test_a_report_names_the_machine_and_its_packages(day):
    part, out = day
    names = part("names", "yield 'a', {}")
    (out.parent / "modules" / "sitecustomize.py").unlink()
    (report,) = run_parts([names], out)
    assert report["status"] == PASSED and {"processor", "torch", "deepspeed", "commit"} <= report["machine"].keys()


def test_what_passed_is_not_run_again_and_all_else_is(day):
    part, out = day
    parts = [
        counting(part, "passes", "yield 'a', {'value': 1}"),
        counting(part, "breaks", "yield 'a', {'value': 2}", "raise OSError('no such thing')"),
        counting(part, "finds", "yield 'a', {'failure': 'too slow'}", "yield 'b', {'value': 3}"),
        counting(part, "lacks", "yield 'a', {'not run': 'no NCCL'}"),
    ]
    for _ in range(2):
        reports = run_parts(parts, out)
    assert [times_run(out, each) for each in parts] == [1, 2, 2, 2]
    assert [report["status"] for report in reports] == [PASSED, FAILED, FAILED, NOT_RUN]
    assert [report["reason"] for report in reports] == ["", "exit status 1", "a: too slow", "a: no NCCL"]
    assert json.loads((out / "summary.json").read_text()) == {"parts": reports}
    assert reports == [report_of(out, each) for each in parts]


def test_a_part_that_breaks_keeps_what_it_found_and_the_end_of_its_output(day):
    part, out = day
    breaks = part("breaks", "print('x' * 9999)", "yield 'a', {'value': 2}", "raise OSError('no such thing')")
    (report,) = run_parts([breaks], out)
    assert report["results"] == {"a": {"value": 2}}
    assert len(report["output"]) == 4000 and report["output"].endswith("OSError: no such thing\n")


def test_a_part_that_takes_too_long_is_stopped_with_its_children(day):
    part, out = day
    sleeps = part(
        "sleeps",
        "child = os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '600')",
        "yield 'child', {'pid': child}",
        "time.sleep(600)",
        seconds=3,
    )
    after = part("after", "yield 'a', {}")
    report, later = run_parts([sleeps, after], out)
    assert (report["status"], report["reason"], later["status"]) == (FAILED, "stopped after 3 s", PASSED)
    assert is_gone(report["results"]["child"]["pid"])


def test_a_part_that_passed_leaves_no_children(day):
    part, out = day
    leaves = part("leaves", "yield 'child', {'pid': os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '600')}")
    (report,) = run_parts([leaves], out)
    assert report["status"] == PASSED
    assert is_gone(report["results"]["child"]["pid"])


def is_gone(pid):
    """Whether the process ends soon. Its entry may outlive it where no process collects orphans."""
    wait(lambda: not is_alive(pid), 10)
    return not is_alive(pid)


def test_a_part_that_does_not_fit_into_the_budget_is_not_started(day):
    part, out = day
    parts = [part("long", "yield 'a', {}", seconds=400), part("short", "yield 'a', {}", seconds=20)]
    long, short = run_parts(parts, out, seconds=50)
    assert (long["status"], short["status"]) == (NOT_RUN, PASSED)
    assert long["reason"].startswith("takes up to 400 s, and ")
    assert not (out / "long.json").exists()
    assert as_table([long, short]).splitlines()[1].split()[:4] == ["long", "not", "run", "0"]


def test_a_part_is_stopped_before_the_budget_is_over_and_keeps_what_it_found(day, monkeypatch):
    monkeypatch.setattr(runner, "SHORTEST", 2)
    part, out = day
    long = part("long", "print('so far')", "yield 'a', {'value': 1}", "time.sleep(600)", seconds=400)
    (report,) = run_parts([long], out, seconds=runner.RESERVE + 3)
    assert (report["status"], report["results"]) == (FAILED, {"a": {"value": 1}})
    assert report["reason"] in ("stopped after 2 s", "stopped after 3 s")
    assert (out / "long.log").read_text() == report["output"] == "so far\n"


def test_what_was_never_tried_comes_first(day):
    part, out = day
    order = ["(out / 'order').open('a').write(os.path.basename(__file__)[0])", "yield 'a', {'failure': 'late'}"]
    parts = [part("again", *order), part("new", *order)]
    run_parts(parts, out, only="again")
    reports = run_parts(parts, out)
    assert (out / "order").read_text() == "ana" and [report["part"] for report in reports] == ["again", "new"]


def test_the_summary_names_the_part_that_runs(day):
    part, out = day
    looks = part("looks", "import json", "yield 'seen', json.loads((out / 'summary.json').read_text())")
    (report,) = run_parts([looks], out)
    assert [each["status"] for each in report["results"]["seen"]["parts"]] == ["running"]


def test_one_part_alone_leaves_the_others_reports_as_they_are(day):
    part, out = day
    parts = [counting(part, name, "yield 'a', {}") for name in ("first", "second", "third")]
    run_parts(parts, out, only="first")
    reports = run_parts(parts, out, only="third")
    assert [report["part"] for report in reports] == ["first", "third"]
    assert [times_run(out, each) for each in parts] == [1, 0, 1]


def test_a_dry_run_is_on_the_cpu_and_counts_for_dry_runs_only(day, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR")
    part, out = day
    device = counting(part, "device", "yield 'device', {'name': os.environ.get('DS_ACCELERATOR', 'any')}")
    for dry_run, times in ((True, 1), (True, 1), (False, 2)):
        (report,) = run_parts([device], out, dry_run=dry_run)
        assert (report["dry_run"], times_run(out, device)) == (dry_run, times)
        assert report["results"]["device"]["name"] == ("cpu" if dry_run else "any")


def test_an_unfinished_report_is_of_no_part_that_passed(day):
    part, out = day
    each = part("each", "import json", "yield 'a', {}", "yield 'seen', json.loads((out / 'each.json').read_text())")
    (report,) = run_parts([each], out)
    seen = report["results"]["seen"]
    assert (seen["status"], seen["results"]) == ("running", {"a": {}})
    (out / "each.json").write_text(json.dumps(seen))
    (report,) = run_parts([each], out)
    assert report["status"] == PASSED


def test_every_part_ends_within_eight_minutes_and_has_a_module():
    assert all(part.seconds < 480 for part in PARTS)
    assert all((ROOT / f"{part.module.replace('.', '/')}.py").exists() for part in PARTS)


@pytest.mark.parametrize(("status", "code"), [(PASSED, 0), (NOT_RUN, 0), (FAILED, 1)])
def test_the_command_passes_its_flags_on_and_fails_if_a_part_does(status, code, monkeypatch, capsys, tmp_path):
    asked = []

    def run(*arguments):
        asked.append(arguments)
        return [{"part": "stages", "status": status, "seconds": 3.2, "results": {"a": {}}, "reason": "why"}]

    monkeypatch.setattr(command, "run_parts", run)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    words = ["--out", str(tmp_path), "--seconds", "90", "--part", "stages", "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["benchmarks", "gpu-day", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, asked) == (code, [(PARTS, tmp_path, 90.0, True, "stages")])
    assert capsys.readouterr().out.splitlines()[1].split() == ["stages", *status.split(), "3", "1", "why"]


def test_without_a_gpu_only_a_dry_run_is_possible(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "run_parts", lambda *_: pytest.fail("parts were started"))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "gpu-day", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="no GPU is there; .* --dry-run"):
        main()


def test_a_dry_run_is_no_record(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "run_parts", lambda *_: pytest.fail("parts were started"))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "gpu-day", "--out", str(tmp_path), "--dry-run", "--record"])
    with pytest.raises(SystemExit, match="--record keeps what a GPU computed; leave out --dry-run"):
        main()


@pytest.mark.parametrize("wanted", [False, True])
def test_the_findings_are_kept_if_they_are_wanted(wanted, monkeypatch, tmp_path):
    reports = [{"part": "stages", "status": PASSED, "results": {}, "reason": ""}]
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "run_parts", lambda *_: reports)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    kept = []
    monkeypatch.setattr(command.findings, "keep", kept.append)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "gpu-day", "--out", str(tmp_path), *["--record"] * wanted])
    with pytest.raises(SystemExit):
        main()
    assert kept == [reports] * wanted


@pytest.mark.slow
def test_a_dry_run_passes_and_does_every_parts_work(tmp_path):
    words = [sys.executable, "-m", "benchmarks", "gpu-day", "--out", str(tmp_path), "--dry-run"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    reports = json.loads((tmp_path / "summary.json").read_text())["parts"]
    assert {report["part"]: report["status"] for report in reports} == {part.name: PASSED for part in PARTS}
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1 + len(PARTS))
    results = {report["part"]: report["results"] for report in reports}
    assert results["stages"]["bf16, ZeRO-3"]["host waits"] == "not available on cpu"
    assert len(results["stages"]) == 10
    assert list(results["settings"]) == ["one process", *(f"P1 W1, {name}" for name in TRIALS)]
    assert list(results["ranks"]) == ["one process", "P2 W1, gloo", "P1 W2, gloo", "P2 W2, gloo"]
    for found in results["killed"].values():
        assert all(seconds is not None for seconds in found["seconds"])
        assert sorted(found["exit status"]) == [-9] + [1] * (len(found["seconds"]) - 1)
    assert "failures" not in results["speed"]["record"]
    for name in ("offload", "largest", "recomputation", "compiled", "vocabulary"):
        assert not any("outcome" in found for found in results[name].values())
    assert all((found["layers"], found["too large"]) == (4, {}) for found in results["largest"].values())
    for found in results["launches"].values():
        assert 0 < found["issued after"] <= found["seconds"]
    computes = results["launches"][f"{OURS}, tiny"]["actions"]
    assert computes["F"]["count"] == computes["B"]["count"] > 0
    assert results["trace"]["step"]["file"] == "trace_tiny.json.gz"
    assert (tmp_path / "trace_tiny.json.gz").stat().st_size < trace.LARGEST
