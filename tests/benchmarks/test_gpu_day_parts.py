"""The parts of ``python -m benchmarks gpu-day``: what they find, refuse and keep, without a GPU."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpt.offload import DEEPSPEED, ON_HOST
from benchmarks.gpt.sizes import SIZES, TINY
from benchmarks.gpu_day import beside, equality, killed, largest, launches, layouts, ranks, speed, trace, waits
from benchmarks.gpu_day.wheels import THERE, WANTED, closure
from benchmarks.record import OURS, Record
from testing import ROOT


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
        engine=SimpleNamespace(lgamp=SimpleNamespace(executor=executor)),
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
    assert first["at"].startswith("tests/benchmarks/test_gpu_day_parts.py:") and "in step: warnings.warn" in first["at"]
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
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
    assert os.environ == {**shared, "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
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
    record.fail(f"{OURS}, ZeRO-1", {"size": "125M"}, "not run: the time was over")
    found = speed.as_result(record)
    assert found["failure"] == "ds_lgamp, ZeRO-3 125M: out of memory"
    assert found["not run"] == "ds_lgamp, ZeRO-1 125M: not run: the time was over"
    assert [failure["contender"] for failure in found["failures"]][:2] == ["DeepSpeed ZeRO-0", "ds_lgamp, ZeRO-3"]


def test_offloading_fails_by_ours_alone_and_by_other_losses_than_in_memory():
    size = SIZES[TINY]
    run = {"losses": [4.0, 2.0], "seconds": [2.0, 4.0, 3.0], "peak": 7, "reserved": 8}
    found = beside.as_result(ON_HOST, size, run, [4.0, 2.0])
    assert (found["tokens per second"], found["micro-batches"]) == (size.tokens / 3, size.micro_batches)
    assert "failure" not in found and "outcome" not in found
    for contender, key in ((ON_HOST, "failure"), (DEEPSPEED, "outcome")):
        assert "in step 2" in beside.as_result(contender, size, run, [4.0, 2.1])[key]
        assert beside.as_result(contender, size, {"failure": "out of memory"}, None)[key] == "out of memory"
    over = {"not run": "the time was over"}
    found = beside.as_result(ON_HOST, size, over, None)
    assert found == {**over, "contender": ON_HOST, "micro-batches": size.micro_batches}
    assert beside.as_result(DEEPSPEED, size, over, None)["outcome"] == "the time was over"


def test_the_first_size_that_trains_is_the_largest(monkeypatch, tmp_path):
    asked = []

    def train(contender, size):
        asked.append(size.layers)
        if size.layers > 2:
            raise RuntimeError(f"out of memory with {size.layers}\nlayers")
        return {"layers": size.layers}

    monkeypatch.setattr(largest, "_train", train)
    monkeypatch.setattr(largest, "start_hosts", lambda: None)
    largest._train_smaller_and_smaller(None, tmp_path / "tried.json")
    assert asked == [4, 2]
    kept = json.loads((tmp_path / "tried.json").read_text())
    assert kept == {"layers": 2, "too large": {"4": "RuntimeError: out of memory with 4"}}


def test_what_was_tried_before_the_memory_of_the_host_was_over_is_kept(monkeypatch):
    def run_on_ranks(_, work, contender, results, **__):
        results.write_text('{"too large": {"64": "no"}}')
        raise AssertionError("rank 0 failed:\nTraceback\nOutOfMemoryError: 80 GB\n")

    monkeypatch.setattr(largest, "run_on_ranks", run_on_ranks)
    found = dict(largest.run(Path()))
    assert list(found) == list(largest.COMPARED)
    reason = "OutOfMemoryError: 80 GB"
    kept = {"too large": {"64": "no"}, "ended by": reason}
    assert found[ON_HOST] == {"contender": ON_HOST, **kept, "failure": reason}
    assert found[DEEPSPEED] == {"contender": DEEPSPEED, **kept, "outcome": reason}


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


def test_launches_are_counted_by_kind_of_action_and_idle_time_in_computes_is_what_graphs_could_save():
    events = [
        event("user_annotation", "F0.0", 0, 40),
        event("user_annotation", "F0.1", 40, 100),
        event("user_annotation", "B0.1", 100, 160),
        event("user_annotation", "WAIT_REDUCE0", 160, 200),
        event("user_annotation", "Optimizer.step#AdamW.step", 200, 400),
        *[event("cuda_runtime", "cudaLaunchKernel", at, at + 5) for at in (10, 50, 60, 110, 210)],
        event("cuda_driver", "cuLaunchKernelEx", 120, 125),
        event("cuda_runtime", "cudaMemcpyAsync", 20, 25),
        event("cuda_runtime", "cudaEventRecord", 30, 35),
        event("kernel", "gemm", 20, 100),
        event("gpu_memcpy", "copy", 120, 140),
        event("kernel", "update", 220, 400),
    ]
    assert launches.figures(events) == {
        "launches": 7,
        "traced seconds": 400e-6,
        "idle": pytest.approx(0.3),
        # 20 us before the first kernel, and 40 us of the backward.
        "idle in computes": pytest.approx(0.15),
        "actions": {
            "F": {"count": 2, "launches": 2, "us": 50},
            "B": {"count": 1, "launches": 2, "us": 60},
            "WAIT_REDUCE": {"count": 1, "launches": 0, "us": 40},
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


def test_what_ranks_are_forked_from_asks_for_gpus_without_starting_cuda():
    # torch's documentation of multiprocessing: with another check, no process that is forked later can use CUDA.
    asks = "import os, testing.ranks; print(os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'])"
    told = subprocess.run([sys.executable, "-c", asks], cwd=ROOT, env={}, capture_output=True, text=True)
    assert told.stdout == "1\n"
