"""``python -m benchmarks gpu-day``: its dry run on the CPU, and how it resumes, fails and ends with stand-in parts."""

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.gpt.sizes import SIZES, TINY
from benchmarks.gpu_day import (
    PARTS,
    Part,
    command,
    equality,
    killed,
    largest,
    layouts,
    offload,
    ranks,
    runner,
    speed,
    trace,
    waits,
)
from benchmarks.gpu_day.runner import FAILED, NOT_RUN, PASSED, as_table, run_parts
from benchmarks.gpu_day.wheels import THERE, WANTED, closure
from benchmarks.record import OURS, Record
from testing import ROOT


@pytest.fixture
def day(tmp_path, monkeypatch):
    """Returns a function that writes a stand-in part, and the folder of the results."""
    folder = tmp_path / "modules"
    folder.mkdir()
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
        seconds=5,
    )
    after = part("after", "yield 'a', {}")
    report, later = run_parts([sleeps, after], out)
    assert (report["status"], report["reason"], later["status"]) == (FAILED, "stopped after 5 s", PASSED)
    assert is_gone(report["results"]["child"]["pid"])


def test_a_part_that_passed_leaves_no_children(day):
    part, out = day
    leaves = part("leaves", "yield 'child', {'pid': os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '600')}")
    (report,) = run_parts([leaves], out)
    assert report["status"] == PASSED
    assert is_gone(report["results"]["child"]["pid"])


def is_gone(pid):
    """Whether the process ends soon. Its entry may outlive it where no process collects orphans."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


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
    (report,) = run_parts([long], out, seconds=runner.RESERVE + 5)
    assert (report["status"], report["results"]) == (FAILED, {"a": {"value": 1}})
    assert report["reason"] in ("stopped after 4 s", "stopped after 5 s")
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


@pytest.fixture
def modes(monkeypatch):
    """The debug modes that were set, on a device that looks like a GPU."""
    found = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", found.append)
    monkeypatch.setattr(waits, "device", lambda: torch.device("cuda"))
    return found


def training(step):
    """A training whose step calls ``step`` with a function that sets the action."""
    executor = SimpleNamespace(current=None)
    return SimpleNamespace(
        engine=SimpleNamespace(executor=executor),
        step=lambda: step(lambda action: setattr(executor, "current", action)),
    )


def test_every_wait_is_noted_with_its_action_and_line(modes):
    def step(during):
        during("F0.1")
        for _ in range(2):
            warnings.warn(waits.WARNING, stacklevel=1)
        during(None)
        warnings.warn(waits.WARNING, stacklevel=1)

    found = waits.waits_in_a_step(training(step))
    first, second = found["host waits"]
    assert (first["action"], first["times"], second["action"], second["times"]) == ("F0.1", 2, "no action", 1)
    assert first["at"].startswith("tests/benchmarks/test_gpu_day.py:") and "in step: warnings.warn" in first["at"]
    assert found["failure"] == f"the host waits in a step, first in F0.1: {first['at']}"
    assert modes == ["warn", "default"]


def test_other_warnings_are_no_waits_and_still_shown(modes):
    with pytest.warns(UserWarning, match="something else") as shown:
        found = waits.waits_in_a_step(training(lambda during: warnings.warn("something else", stacklevel=1)))
    assert (found, len(shown)) == ({"host waits": []}, 2)
    assert modes == ["warn", "default", "error", "default"]


def test_a_step_without_warnings_must_also_pass_where_a_wait_is_an_error(modes):
    def step(during):
        if modes[-1] == "error":
            raise RuntimeError("rank 0 failed at STEP: called a synchronizing CUDA operation")

    found = waits.waits_in_a_step(training(step))
    assert found["failure"] == "a step that may not wait: rank 0 failed at STEP: called a synchronizing CUDA operation"
    assert modes[-1] == "default"


def test_losses_may_differ_by_the_precisions_tolerance():
    for precision, tolerance in (("fp32", 1e-5), ("bf16", 1e-3)):
        assert "failure" not in equality.compared([4.0, 2.0 * (1 + tolerance / 2)], [4.0, 2.0], precision)
        found = equality.compared([4.0, 2.0 * (1 + tolerance * 2)], [4.0, 2.0], precision)
        assert "in step 2" in found["failure"]
        assert found["largest difference"] == pytest.approx(2 * tolerance)
    assert "failure" in equality.compared([float("nan")], [4.0], "bf16")


def test_an_error_of_ranks_is_named_by_its_cause_and_kept_as_a_whole():
    text = "rank 1 failed:\nTraceback (most recent call last):\n    a: int = 3\nlib.AnyError: too large\nhint\n"

    def fail():
        raise AssertionError(text)

    found = equality.caught(fail)
    assert found["failure"] == "lib.AnyError: too large"
    assert "in fail" in found["error"] and text in found["error"]


@pytest.mark.parametrize(
    ("device", "devices", "version", "reason"),
    [
        ("cuda", 1, (2, 28, 9), "NCCL 2.28.9 < 2.30"),
        ("cuda", 2, (2, 28, 9), None),
        ("cuda", 1, (2, 30, 3), None),
        ("cpu", 1, (2, 28, 9), None),
    ],
)
def test_several_ranks_on_a_gpu_need_a_new_nccl(device, devices, version, reason, monkeypatch):
    accelerator = SimpleNamespace(device_name=lambda: device, device_count=lambda: devices)
    monkeypatch.setattr(layouts, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(layouts, "nccl_version", lambda: version)
    assert layouts.too_old(2) == reason


@pytest.mark.parametrize("old", [None, "NCCL 2.28.9 < 2.30"])
def test_layouts_run_with_few_and_many_queues_or_where_nccl_is_old_over_gloo(old, monkeypatch):
    accelerator = SimpleNamespace(device_name=lambda: "cuda", communication_backend_name=lambda: "nccl")
    monkeypatch.setattr(ranks, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(ranks, "too_old", lambda _: old)
    monkeypatch.setattr(ranks, "run_on_ranks", lambda *_, **__: [{"fp32": [2.0], "bf16": [2.0]}])
    asked = []

    def measured(layout, connections, expected, over):
        asked.append((str(layout), connections, over))
        raise AssertionError("ranks [0, 1] hang")

    monkeypatch.setattr(ranks, "measured", measured)
    found = dict(ranks.run(Path()))
    names = ["P2 W1", "P1 W2", "P2 W2"]
    if old is None:
        assert asked == [(name, connections, "nccl") for connections in (1, 8, 32) for name in names]
        assert found["P2 W1, 1 connections"]["failure"] == "AssertionError: ranks [0, 1] hang"
    else:
        assert asked == [("P1 W2", None, "gloo")]
        assert all(found[name] == {"not run": old} for name in names)
        assert found["P1 W2, gloo"]["outcome"] == "AssertionError: ranks [0, 1] hang"
        assert "failure" not in found["P1 W2, gloo"]
        monkeypatch.setattr(killed, "too_old", lambda _: old)
        assert list(dict(killed.run(Path())).values()) == [{"not run": old}] * 3


def test_a_rank_is_set_up_before_cuda_starts(monkeypatch):
    monkeypatch.setattr(layouts, "prepare_process", lambda rank, device: prepared.append((rank, device)))
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(layouts, "shares", lambda ranks: ranks > 4)
    prepared = []
    layouts.share_device(3, ranks=8, connections=8)
    layouts.share_device(3, ranks=4)
    assert os.environ == {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert prepared == [(3, 0), (3, None)], "every rank gets a GPU if there are enough"


def test_a_rank_that_runs_on_is_seen(monkeypatch):
    monkeypatch.setattr(killed, "UNTIL_ENDED", 2)
    ended, runs_on = subprocess.Popen(["true"]), subprocess.Popen(["sleep", "600"])
    try:
        first, second = killed.seconds_to_end([ended, runs_on])
    finally:
        runs_on.kill()
        runs_on.wait()
    assert first is not None and second is None


def test_only_runs_of_ours_can_fail_the_speed():
    record = Record("gpu", {})
    record.fail("DeepSpeed ZeRO-0", {"size": "6.7B"}, "out of memory")
    assert "failure" not in speed.as_result(record)
    record.fail(f"{OURS}, ZeRO-3", {"size": "125M"}, "out of memory")
    found = speed.as_result(record)
    assert found["failure"] == "ds_lgamp, ZeRO-3 125M: out of memory"
    assert [failure["contender"] for failure in found["failures"]] == ["DeepSpeed ZeRO-0", "ds_lgamp, ZeRO-3"]


def test_offloading_fails_by_ours_alone_and_by_other_losses_than_in_memory(monkeypatch):
    size = SIZES[TINY]
    run = {"losses": [4.0, 2.0], "seconds": [2.0, 4.0, 3.0], "peak": 7}
    monkeypatch.setattr(offload, "measure", lambda *_: {"full": run})
    ours, peer = offload.CONTENDERS[1], offload.CONTENDERS[3]
    found = offload.measured(ours, size, 0.0, [4.0, 2.0])
    assert found == {"tokens per second": size.tokens / 3, "peak bytes": 7, "losses": [4.0, 2.0]}
    assert "in step 2" in offload.measured(ours, size, 0.0, [4.0, 2.1])["failure"]
    assert "in step 2" in offload.measured(peer, size, 0.0, [4.0, 2.1])["outcome"]
    monkeypatch.setattr(offload, "measure", lambda *_: {"full": {"failure": "out of memory"}})
    assert offload.measured(ours, size, 0.0, None) == {"failure": "out of memory"}
    assert offload.measured(peer, size, 0.0, None) == {"outcome": "out of memory"}


def test_what_trained_before_memory_was_over_is_kept(monkeypatch):
    def run_on_ranks(_, work, contender, results, **__):
        results.write_text('[{"layers": 8}]')
        raise AssertionError("rank 0 failed:\nTraceback\nOutOfMemoryError: 80 GB\n")

    monkeypatch.setattr(largest, "run_on_ranks", run_on_ranks)
    found = dict(largest.run(Path()))
    assert all(each == {"trained": [{"layers": 8}], "ended by": "OutOfMemoryError: 80 GB"} for each in found.values())
    monkeypatch.setattr(largest, "run_on_ranks", lambda *_, **__: [None])
    found = dict(largest.run(Path()))
    assert {name for name, each in found.items() if "failure" in each} == {
        contender.name for contender in offload.CONTENDERS if contender.name.startswith(OURS)
    }


def event(category, name, begin, end):
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin}


def test_a_trace_gives_busy_time_kernels_and_waits_by_action():
    events = [
        event("user_annotation", "F0.0", 0, 4e3),
        event("user_annotation", "STEP", 5e3, 9e3),
        event("user_annotation", "Optimizer.step#AdamW.step", 6e3, 8e3),
        event("cuda_runtime", "cudaStreamSynchronize", 7e3, 7.5e3),
        event("cuda_runtime", "cudaDeviceSynchronize", 9.5e3, 10e3),
        event("cuda_runtime", "cudaMemcpyAsync", 1e3, 2e3),
        event("kernel", "gemm", 1e3, 4e3),
        event("kernel", "gemm", 6e3, 7e3),
        event("kernel", "reduce", 3e3, 5e3),
    ]
    assert trace.figures(events) == {
        "seconds": 0.01,
        "busy": 0.5,
        "kernels": 3,
        "longest kernels, ms": {"gemm": 4.0, "reduce": 2.0},
        "host waits, ms": {
            "cudaStreamSynchronize in STEP > Optimizer.step#AdamW.step": 0.5,
            "cudaDeviceSynchronize in no action": 0.5,
        },
    }


def test_a_trace_that_is_too_large_to_carry_is_removed(tmp_path, monkeypatch):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(bytes(10))
    monkeypatch.setattr(trace, "LARGEST", 10)
    assert (trace.kept(path), path.exists()) == ("trace.json.gz", True)
    monkeypatch.setattr(trace, "LARGEST", 9)
    assert (trace.kept(path), path.exists()) == ("removed: 10 bytes", False)


def test_wheels_are_of_all_that_is_needed_beside_torch():
    present = set(closure(THERE, ()))
    needed = list(closure(WANTED, present))
    assert needed[: len(WANTED)] == list(WANTED)
    assert {"pydantic-core", "hjson", "einops"} < set(needed)
    assert not present & set(needed)


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
    assert list(results["ranks"]) == ["one process", "P2 W1, gloo", "P1 W2, gloo", "P2 W2, gloo"]
    for found in results["killed"].values():
        assert all(seconds is not None for seconds in found["seconds"])
        assert sorted(found["exit status"]) == [-9] + [1] * (len(found["seconds"]) - 1)
    assert "failures" not in results["speed"]["record"]
    for name in ("offload", "largest"):
        assert not any("outcome" in found for found in results[name].values())
    assert all([each["layers"] for each in found["trained"]] == [2, 4] for found in results["largest"].values())
    assert results["trace"]["step"]["file"] == "trace_tiny.json.gz"
    assert (tmp_path / "trace_tiny.json.gz").stat().st_size < trace.LARGEST
