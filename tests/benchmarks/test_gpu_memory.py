"""``python -m benchmarks run gpu_memory``: recorded peaks beside explained ones."""

from benchmarks import gpu_memory
from benchmarks.record import OURS, Record
from docs import gpu_tables


def test_every_recorded_peak_of_ours_is_compared(monkeypatch):
    recorded = Record("gpu", {})
    config = {"size": "1.3B", "recompute": "none"}
    recorded.add("plain torch", config, "peak memory", [5e9], "bytes")
    recorded.add(f"{OURS}, ZeRO-3", config, "peak reserved memory", [9e9], "bytes")
    recorded.add(f"{OURS}, ZeRO-3", config, "peak memory", [6.3e9], "bytes")
    monkeypatch.setattr(gpu_memory, "read", lambda name: recorded)
    asked = []
    monkeypatch.setattr(gpu_memory, "explained", lambda *words: asked.append(words) or 6_000_000_000)
    record = gpu_memory.run()
    assert asked == [("1.3B", "none", 3)]
    assert [(row.metric, row.median) for row in record.rows] == [("explained", 6e9), ("measured / explained", 1.05)]
    assert [(round(target.value, 9), target.met) for target in record.targets] == [(0.05, False)]
    monkeypatch.setattr(gpu_tables, "read", lambda name: record)
    assert gpu_tables.memory().splitlines()[-1] == f"| {OURS}, ZeRO-3 | 1.3B | none | 6.30 | 6.00 | 1.0500 |"


def test_explain_follows_the_recomputation_and_the_stage():
    full, without = (gpu_memory.explained("tiny", recompute, 3) for recompute in ("full", "none"))
    assert 0 < full < without
