"""The part of ``python -m benchmarks gpu-day`` that tries every setting, and the record of what the parts found."""

import ctypes
import json
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from benchmarks.gpt.contenders import BASELINE
from benchmarks.gpt.offload import DEEPSPEED, DEFERRED, FSDP2_IN_MEMORY, IN_MEMORY, ON_HOST, STATE_IN_BF16
from benchmarks.gpt.sizes import SIZES, TINY
from benchmarks.gpu_day import beside, environment, findings, nccl, offload_large, settings
from benchmarks.gpu_day.layouts import Layout
from benchmarks.gpu_day.recomputation import FIXED, WITHIN
from benchmarks.record import MET, MISSED, OURS, Row
from docs import gpu_tables, tables


def works(layout, expected, folder):
    """A trial: on every rank its folder exists and is empty."""
    return {"files": len(list(folder.iterdir())), "ranks": dist.get_world_size()}


def breaks(layout, expected, folder):
    if dist.get_rank() == layout.ranks - 1:
        raise ValueError("no such thing")
    return works(layout, expected, folder)


def test_a_setting_that_fails_on_one_rank_costs_the_others_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(settings, "TRIALS", {"first": works, "breaks": breaks, "last": works})
    found = dict(settings.tried(Layout(1, 2), {}, tmp_path, "gloo"))
    assert list(found) == ["first", "breaks", "last"]
    assert found["first"] == found["last"] == {"files": 0, "ranks": 2}
    assert found["breaks"]["failure"] == "ValueError: no such thing" and "breaks" in found["breaks"]["error"]
    assert list(tmp_path.iterdir()) == []


def test_what_was_found_is_told_while_the_ranks_go_on(monkeypatch, tmp_path):
    monkeypatch.setattr(settings, "TRIALS", {"first": works, "waits": waits_for_a_file})
    found = settings.tried(Layout(1, 1), {"file": str(tmp_path / "told")}, tmp_path, "gloo")
    assert next(found)[0] == "first"
    (tmp_path / "told").touch()
    assert next(found) == ("waits", {})


def waits_for_a_file(layout, expected, folder):
    """A trial that ends when the file that ``expected`` names is there."""
    while not Path(expected["file"]).exists():
        dist.barrier()
    return {}


def report(part="settings", dry_run=False, **results):
    machine = {
        "commit": "abc",
        "cores": 16,
        "processor": "Xeon",
        "python": "3.12",
        "torch": "2.11",
        "deepspeed": "0.19",
    }
    return {"part": part, "dry_run": dry_run, "machine": {**machine, "accelerator": "GPU"}, "results": results}


STAGES = report(
    "stages", **{"fp32, ZeRO-0": {"largest difference": 0.0, "host waits": [{"at": "x"}], "failure": "waits"}}
)
RANKS = report("ranks", **{"one process": {}, "P2 W1, gloo": {"fp32, ZeRO-3": {"largest difference": 0.5}}})


def test_the_record_has_a_row_for_every_comparison_with_plain_torch():
    stages = {"part": "stages", "where": "fp32", "what": "ZeRO-0"}
    ranks = {"part": "ranks", "where": "P2 W1", "what": "gloo, fp32, ZeRO-3"}
    record = findings.as_record(STAGES)
    assert record.rows == [
        Row(OURS, stages, findings.DIFFERENCE, 0.0, 0.0, "ratio"),
        Row(OURS, stages, findings.WAITS, 1, 0, ""),
    ]
    assert [(failure.config, failure.reason) for failure in record.failures] == [(stages, "waits")]
    assert [(target.value, target.met) for target in record.targets] == [(1, False)]
    assert findings.as_record(RANKS).rows == [Row(OURS, ranks, findings.DIFFERENCE, 0.5, 0.0, "ratio")]


def rate(contender, micro_batches, seconds, trial="", peak=7):
    size = SIZES[TINY]._replace(micro_batches=micro_batches)
    found = beside.as_result(contender, size, {"losses": [1.0], "seconds": seconds, "peak": peak}, None)
    return {"trial": trial, **found}


OFFLOAD = report(
    "offload",
    **{
        "in memory, 16": rate(IN_MEMORY, 16, [1.0]),
        "host, 4": rate(ON_HOST, 4, [1.0]),
        "host, 16": rate(ON_HOST, 16, [1.0, 1.25, 2.0]),
        "DeepSpeed, 4": rate(DEEPSPEED, 4, [4.0]),
        "DeepSpeed, 16": {"trial": "", "contender": DEEPSPEED, "micro-batches": 16, "outcome": "out of memory"},
    },
)
LARGEST = report(
    "largest",
    host={"contender": ON_HOST, "layers": 9, "parameters": 90},
    peer={"contender": FSDP2_IN_MEMORY, "layers": 1, "parameters": 9},
    other={"contender": DEEPSPEED, "outcome": "no size trained"},
)


def test_the_record_has_speed_and_size_with_offloading():
    record = findings.as_record(OFFLOAD)
    rates = {(row.contender, row.config["micro_batches"]): row.median for row in record.rows if row.unit == "tokens/s"}
    tokens = SIZES[TINY]._replace(micro_batches=16).tokens
    assert rates[ON_HOST, 16] == tokens / 1.25 and rates[ON_HOST, 4] == tokens / 4 and len(rates) == 4
    assert [row.median for row in record.rows if row.unit == "bytes"] == [7] * 4
    assert [(each.contender, each.reason) for each in record.failures] == [(DEEPSPEED, "out of memory")]
    slower, share = record.targets
    assert slower.text.endswith("4 micro-batches") and share.text.endswith("16 micro-batches")
    assert (slower.value, slower.limit, slower.met) == (pytest.approx(0.25), 1 / 3, True)
    assert (share.value, share.limit, share.met) == (pytest.approx(1.25), 1 / 0.9, False)
    sizes = findings.as_record(LARGEST)
    assert [(target.value, target.met) for target in sizes.targets] == [(pytest.approx(0.1), True)]
    assert [each.reason for each in sizes.failures] == ["no size trained"]


def targets_of(part, *results):
    """The targets of a part with these results, by the end of their texts."""
    record = findings.as_record(report(part, **{str(number): found for number, found in enumerate(results)}))
    return {target.text.removeprefix(f"{part}: "): (target.value, target.met) for target in record.targets}


def test_a_training_within_a_budget_is_compared_with_the_budget_and_with_what_takes_no_more():
    assert targets_of(
        "recomputation",
        rate(WITHIN, 4, [1.0], "auto", peak=41e9),
        rate(FIXED, 4, [2.0], "full", peak=28e9),
        rate(FIXED, 4, [0.5], "none", peak=75e9),
        rate(FSDP2_IN_MEMORY, 4, [0.8], "none", peak=32e9),
        rate(FSDP2_IN_MEMORY, 4, [0.4], "half", peak=48e9),
    ) == {
        f"{findings.PEAK} of {WITHIN} / 40 GB": (pytest.approx(1.025), False),
        f"{findings.RATE} of full recomputation / of {WITHIN}": (pytest.approx(0.5), True),
        f"{findings.RATE} of the fastest FSDP2 in 40 GB / of {WITHIN}": (pytest.approx(1.25), False),
    }
    assert targets_of("recomputation", rate(FIXED, 4, [2.0], "full")) == {}


def test_compiled_is_compared_with_compiled_and_plain_with_plain():
    assert targets_of(
        "compiled",
        rate(BASELINE, 4, [1.0], "125M"),
        rate(OURS, 4, [1.1], "125M"),
        rate(f"{BASELINE}, compiled", 4, [0.8], "125M"),
        rate(f"{OURS}, compiled", 4, [0.4], "125M"),
        rate(f"{OURS}, compiled", 4, [0.4], "1.3B"),
    ) == {
        f"{findings.RATE} of {BASELINE} / of {OURS}, 125M": (pytest.approx(1.1), False),
        f"{findings.RATE} of {BASELINE}, compiled / of {OURS}, compiled, 125M": (pytest.approx(0.5), True),
    }


@pytest.mark.parametrize(
    ("reports", "reason"),
    [
        ([STAGES, report(dry_run=True)], "settings: a dry run is no record"),
        ([report("speed", record={})], "no part has anything to record"),
    ],
)
def test_without_findings_of_a_gpu_there_is_no_record(reports, reason):
    with pytest.raises(SystemExit, match=reason):
        findings.keep(reports)


def test_a_part_in_which_all_failed_is_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.record.RESULTS", tmp_path)
    findings.keep([report("largest", host={"contender": ON_HOST, "failure": "no size trained"})])
    assert gpu_tables.largest().splitlines()[2:] == [f"| {ON_HOST} |  | no size trained |"]


def test_a_part_takes_its_own_place_in_the_record_and_on_the_page(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.record.RESULTS", tmp_path)
    both = {f"{where}, gpipe": {"largest difference": value} for where, value in (("P1 W1", 0.0), ("P2 W2", 1.5e-5))}
    other = report(**both)
    other["machine"]["accelerator"] = "other GPU"
    findings.keep([STAGES, report(**{"P1 W1, 1f1b": {"largest difference": 1.0}})])
    findings.keep([other, OFFLOAD])
    assert gpu_tables.settings().splitlines()[0] == "| setting | P1 W1 | P2 W2 |"
    assert gpu_tables.settings().splitlines()[2:] == ["| gpipe | 0 | 1.5e-05 |"]
    assert gpu_tables.stages().endswith("In a step of each of these 1, the host waited for the device at 1 places.")
    stages, settings, offloading = gpu_tables.day_machines().splitlines()[2:]
    assert "| stages | GPU |" in stages and "| settings | other GPU |" in settings and "offload" in offloading
    assert json.loads((tmp_path / "gpu_day.json").read_text())["name"] == findings.NAME


def test_a_model_that_the_host_cannot_hold_is_not_trained(monkeypatch):
    monkeypatch.setattr(offload_large, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    monkeypatch.setattr(offload_large, "host_memory", lambda: 110e9)
    monkeypatch.setattr(offload_large, "beside_each_other", lambda size, some: [(each.name, {}) for each in some])
    found = dict(offload_large.run(None))
    assert {name for name, result in found.items() if not result} == {STATE_IN_BF16, DEFERRED}
    assert found[ON_HOST] == found[DEEPSPEED] == {"not run": "the host has 110 GB, and 121 GB are needed"}


def test_the_page_shows_rates_beside_each_other_and_why_one_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.record.RESULTS", tmp_path)
    findings.keep([OFFLOAD, LARGEST])
    heading, _, memory, host, peer = gpu_tables.offloading().splitlines()
    assert heading == "|  | M = 4 | M = 16 | peak memory at M = 16, GB |"
    assert memory.startswith(f"| {IN_MEMORY} |  | ") and host.startswith(f"| {ON_HOST} | ")
    assert peer.startswith(f"| {DEEPSPEED} | ") and peer.endswith(" | out of memory |  |")
    monkeypatch.setattr(tables, "NAMES", [])
    slower, sizes = tables.targets(MET).splitlines()[2:]
    assert slower.startswith("| gpu_day | offload: ") and slower.endswith(" | 0.25 | 0 | 0.3333 |")
    assert sizes.startswith("| gpu_day | largest: ")
    (share,) = tables.targets(MISSED).splitlines()[2:]
    assert share.startswith("| gpu_day | offload: ") and share.endswith(" | 1.25 | 0 | 1.111 |")
    lines = [f"| {ON_HOST} | 9 | 0.00 |", f"| {FSDP2_IN_MEMORY} | 1 | 0.00 |", f"| {DEEPSPEED} |  | no size trained |"]
    assert gpu_tables.largest().splitlines()[2:] == lines


def test_the_version_of_nccl_is_that_of_the_library_that_is_loaded(monkeypatch):
    def tell(number):
        ctypes.cast(number, ctypes.POINTER(ctypes.c_int))[0] = 23007
        return 0

    monkeypatch.setattr(environment.ctypes, "CDLL", {"libnccl.so.2": SimpleNamespace(ncclGetVersion=tell)}.get)
    assert environment.nccl_version() == (2, 30, 7)


def test_a_library_keeps_the_code_of_one_architecture_in_its_place():
    def entry(kind, architecture, code):
        header = struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(code), 0, 0, 0, 0, architecture)
        return header.ljust(64, b"\1") + code

    def fat(*entries):
        inside = b"".join(entries)
        return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(inside)) + inside

    whole = b"elf" + fat(entry(2, 80, b"eighty"), entry(2, 90, b"ninety")) + b"between" + fat(entry(1, 90, b"text"))
    content = bytearray(whole)
    assert nccl.keep_only(content, 90) == len("ninety")
    assert content == whole.replace(b"eighty", bytes(6)).replace(b"text", bytes(4))
