"""``python -m benchmarks run gpu_memory``: recorded peaks beside explained ones."""

import sys

from benchmarks import gpu_memory
from benchmarks.gpt.offload import DEEPSPEED, ON_HOST
from benchmarks.gpu_memory import Training
from benchmarks.record import OURS, Record
from docs import gpu_tables
from testing.forks import run_module


def test_every_recorded_peak_of_ours_is_compared(monkeypatch):
    recorded, offloaded = Record("gpu", {}), Record("gpu_day", {})
    config = {"size": "1.3B", "recompute": "none", "micro_batches": 8}
    recorded.add("plain torch", config, "peak memory", [5e9], "bytes")
    recorded.add(f"{OURS}, ZeRO-3", config, "peak reserved memory", [9e9], "bytes")
    recorded.add(f"{OURS}, ZeRO-3", config, "peak memory", [6.3e9], "bytes")
    for contender in (ON_HOST, DEEPSPEED):
        offloaded.add(contender, {"part": "offload", "micro_batches": 4}, "peak memory", [6e9], "bytes")
    monkeypatch.setattr(gpu_memory, "read", {"gpu": recorded, "gpu_day": offloaded}.get)
    asked = []
    monkeypatch.setattr(gpu_memory, "explained", lambda training: asked.append(training) or 6_000_000_000)
    record = gpu_memory.run()
    everything = ("offload_optimizer", "offload_param")
    assert asked == [Training("1.3B", "none", 3, 8), Training("1.3B", "full", 3, 4, everything)]
    assert [row.median for row in record.rows] == [6e9, 1.05, 6e9, 1]
    assert [(round(target.value, 9), target.met) for target in record.targets] == [(0.05, False)]
    monkeypatch.setattr(gpu_tables, "read", lambda name: record)
    assert gpu_tables.memory().splitlines()[-2] == f"| {OURS}, ZeRO-3 | 1.3B | none | 8 | 6.30 | 6.00 | 1.0500 |"


def test_explain_follows_the_training(monkeypatch):
    def in_a_fork(words, seconds, environment):
        python, option, *command = words
        assert (python, option) == (sys.executable, "-m")
        ended = run_module(command, environment=environment)
        assert ended.status == 0, ended.complaints
        return ended.complaints + ended.output

    monkeypatch.setattr(gpu_memory, "output_of", in_a_fork)
    full, without, more, offloaded = (
        gpu_memory.explained(Training("tiny", *rest))
        for rest in (("full", 3, 3), ("none", 3, 3), ("full", 3, 6), ("full", 3, 3, ("offload_optimizer",)))
    )
    assert 0 < offloaded < full < more and full < without
