"""``python -m benchmarks run gpu``: its dry run on the CPU, and how it handles runs that fail."""

import gzip
import json
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import gpu
from benchmarks.__main__ import main
from benchmarks.gpt.contenders import BASELINE, CONTENDERS, Contender, PlainTorch
from benchmarks.gpt.model import segments
from benchmarks.gpt.sizes import PEAK_FLOPS, SIZES, TINY
from benchmarks.record import OURS, Failure, Record, finish, read
from docs import gpu_tables

LAYERS = [
    "WordEmbedding",
    "PositionEmbedding",
    "TransformerBlock",
    "TransformerBlock",
    "FinalNorm",
    "LanguageModelHead",
]
STAGES = [f"{OURS}, ZeRO-0", f"{OURS}, ZeRO-3"]
DEEPSPEED = ["DeepSpeed ZeRO-0", "DeepSpeed ZeRO-3"]
LAST_LOSS = f"loss of step {gpu.WARM_UP + gpu.STEPS}"


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """Returns the record, the folder of traces and the folder of results."""
    traces, results = tmp_path_factory.mktemp("traces"), tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.record.RESULTS", results)
        return gpu.run(TINY, traces), traces, results


@pytest.mark.slow
def test_every_contender_trains_the_same(dry_run):
    record, *_ = dry_run
    assert record.failures == []
    first, *losses = [row.median for row in record.rows if row.metric == LAST_LOSS]
    assert losses == pytest.approx([first] * len(losses), rel=gpu.LOSS_TOLERANCE)


@pytest.mark.slow
def test_the_record_has_every_run_and_no_figure_the_device_cannot_give(dry_run):
    record, *_ = dry_run
    rows = [(row.contender, row.config["recompute"], row.metric) for row in record.rows]
    runs = [
        *[(BASELINE, recompute) for recompute in ("full", "none", "layers")],
        *[(contender, recompute) for contender in STAGES + DEEPSPEED for recompute in ("full", "none")],
    ]
    assert rows == [(*run, metric) for run in runs for metric in ("tokens per second", LAST_LOSS)]
    assert len({row.config["parameters"] for row in record.rows}) == 1
    assert record.machine["accelerator"] == "cpu"


@pytest.mark.slow
def test_ours_is_compared_with_plain_torch_at_equal_recomputation(dry_run):
    record, *_ = dry_run
    *ratios, failed = record.targets
    rates = {
        (row.contender, row.config["recompute"]): row.median for row in record.rows if row.metric == "tokens per second"
    }
    expected = [
        rates[BASELINE, recompute] / rates[contender, recompute]
        for contender in STAGES
        for recompute in ("full", "none")
    ]
    assert [target.value for target in ratios] == expected
    assert {target.limit for target in ratios} == {1 / 0.98}
    assert (failed.value, failed.limit) == (0, 0)


@pytest.mark.slow
def test_a_step_of_ours_is_profiled(dry_run):
    _, folder, _ = dry_run
    (path,) = folder.iterdir()
    names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert "aten::scaled_dot_product_attention" in names
    assert any("AdamW.step" in str(name) for name in names)


@pytest.mark.slow
def test_no_figures_of_a_cpu_are_recorded(dry_run, monkeypatch):
    _, _, results = dry_run
    assert not any(results.iterdir())
    monkeypatch.setattr(gpu, "measure", lambda *_: pytest.fail("a large size was started"))
    for size in (None, "125M"):
        with pytest.raises(SystemExit, match="no accelerator is there; .* --size tiny"):
            gpu.run(size)


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.record.RESULTS", tmp_path)
    return tmp_path


def test_results_are_kept_after_every_contender(results, monkeypatch):
    kept = []

    def measure(contender, size, deadline, trace):
        kept.append(len(read("gpu").rows) if any(results.iterdir()) else 0)
        measured = {"seconds": [1.0], "losses": [2.0], "peak": 1, "reserved": 2, "parameters": 1, "device": "a GPU"}
        return {"full": measured}

    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(gpu, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    record = gpu.run()
    sizes = [size for size in SIZES if size != TINY]
    assert list(dict.fromkeys(row.config["size"] for row in record.rows)) == sizes
    assert kept == [4 * run for run in range(len(sizes) * len(CONTENDERS))]


def test_the_command_line_keeps_results_of_all_sizes_only(results, monkeypatch, capsys):
    asked = []

    def run(size, trace):
        asked.append((size, trace))
        return Record("gpu", {}, failures=[Failure("peer", {"size": "125M"}, "out of memory")])

    monkeypatch.setitem(sys.modules, "benchmarks.gpu", SimpleNamespace(run=run))
    for words, files in ((["--size", TINY], []), (["--trace", "there"], ["gpu.json"])):
        monkeypatch.setattr(sys, "argv", ["benchmarks", "run", "gpu", *words])
        main()
        assert [path.name for path in results.iterdir()] == files
        assert "FAILED: peer size=125M: out of memory" in capsys.readouterr().out
    assert asked == [(TINY, None), (None, Path("there"))]


class Faulty(PlainTorch):
    """Runs out of memory, trains on a part of the batch, or ends its process. The recomputation setting selects
    which."""

    def __init__(self, size, recompute, device):
        if recompute == "none":
            raise MemoryError("too large\nby far")
        if recompute == "deadly":
            os._exit(1)
        super().__init__(size, recompute, device)
        if recompute == "layers":
            self.batch = self.batch[1:]


@pytest.mark.slow
def test_a_run_that_fails_loses_no_other_and_is_recorded(monkeypatch):
    monkeypatch.setattr(gpu, "CONTENDERS", (Contender("faulty", Faulty, also=("layers", "deadly")),))
    record = gpu.run(TINY)
    reasons = {failure.config["recompute"]: failure.reason for failure in record.failures}
    assert list(reasons) == ["none", "layers", "deadly"]
    assert reasons["none"] == "MemoryError: too large"
    assert "computes something else: loss" in reasons["layers"]
    assert "died without an error" in reasons["deadly"]
    assert {row.config["recompute"] for row in record.rows} == {"full"}


@pytest.mark.parametrize(
    ("left", "limit", "key", "reason"),
    [
        (60, 0.02, "failure", "stopped after 0 s"),
        (0.02, 60, "not run", "the 450 s .* were over"),
        (0, 60, "not run", "the 450 s .* were over"),
    ],
)
def test_who_takes_too_long_fails_and_whose_time_was_up_has_not_run(left, limit, key, reason):
    trials = {kind: gpu.Trial(SIZES[TINY], kind) for kind in ("full", "none")}
    slow = Contender("slow", PlainTorch)
    runs = gpu.measure_trials(slow, trials, time.monotonic() + left, limit=limit)
    assert list(runs) == ["full", "none"]
    assert all(list(run) == [key] and re.fullmatch(reason, run[key]) for run in runs.values())


def test_a_run_for_which_no_time_was_left_has_not_failed():
    record = Record("gpu", {})
    gpu.enter(record, TINY, f"{OURS}, ZeRO-3", {"full": {"not run": "the time was over"}}, None)
    gpu.aim(record)
    assert [failure.reason for failure in record.failures] == ["not run: the time was over"]
    assert [target.value for target in record.targets] == [0]


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        ("full", [(range(0, 3), True), (range(3, 6), False)]),
        ("layers", [(range(i, i + 1), i == 2) for i in range(6)]),
        ("none", [(range(6), False)]),
    ],
)
def test_each_mode_recomputes_its_layers(recompute, expected):
    assert segments(LAYERS, recompute) == expected


@pytest.mark.parametrize(("name", "parameters"), [("125M", 134e6), ("1.3B", 1.34e9), ("6.7B", 6.7e9)])
def test_the_formula_of_operations_is_six_per_matrix_element_and_attention(name, parameters):
    size = SIZES[name]
    matrices = 12 * size.layers * size.width**2 + size.vocabulary * size.width
    attention = 12 * size.layers * size.width * size.sequence
    assert size.model_flops == pytest.approx((6 * matrices + attention) * size.tokens)
    assert matrices + (size.vocabulary + size.sequence) * size.width == pytest.approx(parameters, rel=0.02)


def test_the_page_shows_runs_and_failures_or_that_there_are_none(results):
    assert gpu_tables.gpu() == "Nothing is recorded. `python -m benchmarks run gpu` measures on a GPU."
    record = Record("gpu", gpu.begin("gpu").machine)
    device = next(iter(PEAK_FLOPS))
    run = {
        "seconds": [2.0, 1.0, 4.0],
        "losses": [3.0, 2.0],
        "peak": 5e9,
        "reserved": 6e9,
        "parameters": 7,
        "device": device,
    }
    gpu.enter(record, "125M", BASELINE, {"full": run, "none": {"failure": "too large"}}, run["losses"])
    gpu.aim(record)
    finish(record)
    assert read("gpu") == record
    share = SIZES["125M"].model_flops / 2 / PEAK_FLOPS[device]
    assert gpu_tables.gpu().splitlines()[-2:] == [
        f"| 125M | full | {BASELINE} | 65536 ± 49152 | {share:.1%} | 5.0 | 6.0 | 2.0000 |",
        f"| 125M | none | {BASELINE} | too large |  |  |  |  |",
    ]
