"""The part of ``python -m benchmarks gpu-day`` that tries every setting, and the record of its losses."""

import ctypes
import json
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from benchmarks.gpu_day import environment, losses, nccl, settings
from benchmarks.gpu_day.layouts import Layout
from benchmarks.record import OURS, Row
from docs import gpu_tables


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
    record = losses.as_record([{"part": "speed", "results": {"record": {}}}, STAGES, RANKS])
    stages = {"part": "stages", "where": "fp32", "what": "ZeRO-0"}
    ranks = {"part": "ranks", "where": "P2 W1", "what": "gloo, fp32, ZeRO-3"}
    assert record.rows == [
        Row(OURS, stages, losses.DIFFERENCE, 0.0, 0.0, "ratio"),
        Row(OURS, stages, losses.WAITS, 1, 0, ""),
        Row(OURS, ranks, losses.DIFFERENCE, 0.5, 0.0, "ratio"),
    ]
    assert [(failure.config, failure.reason) for failure in record.failures] == [(stages, "waits")]
    assert [(target.value, target.met) for target in record.targets] == [(1, False)]


@pytest.mark.parametrize(
    ("reports", "reason"),
    [
        ([STAGES, report(dry_run=True)], "settings: a dry run is no record"),
        ([{"part": "speed", "results": {}}], "no part has losses to record"),
    ],
)
def test_without_losses_of_a_gpu_there_is_no_record(reports, reason):
    with pytest.raises(SystemExit, match=reason):
        losses.as_record(reports)


def test_the_page_shows_layouts_beside_each_other(monkeypatch, tmp_path):
    monkeypatch.setattr(losses, "RESULTS", tmp_path)
    both = {f"{where}, gpipe": {"largest difference": value} for where, value in (("P1 W1", 0.0), ("P2 W2", 1.5e-5))}
    losses.keep([STAGES, report(**both)])
    monkeypatch.setattr("benchmarks.record.RESULTS", tmp_path)
    assert gpu_tables.settings().splitlines()[0] == "| setting | P1 W1 | P2 W2 |"
    assert gpu_tables.settings().splitlines()[2:] == ["| gpipe | 0 | 1.5e-05 |"]
    assert gpu_tables.stages().endswith("In a step of each of these 1, the host waited for the device at 1 places.")
    assert "on one GPU with 16 cores" in gpu_tables.day_machine()
    assert json.loads((tmp_path / "gpu_day.json").read_text())["name"] == losses.NAME


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
