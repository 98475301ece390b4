"""Measures peak bytes of live tensors in a model that ends with logits: ``python -m benchmarks run turn``.

A schedule that ends all forwards of the last chunk before its first backward holds the logits of every micro-batch at
once. All contenders here keep the parameters of their chunks, in a pipeline without data-parallel ranks.
"""

from benchmarks.contenders import Layout
from benchmarks.contenders.field import KEPT, in_training
from benchmarks.counting import count
from benchmarks.memory import enter
from benchmarks.model import ModelSize
from benchmarks.record import OURS, REPETITIONS, Record, begin

NAME = "turn"
LAYOUT = Layout(2, 1, ModelSize(blocks=8, width=128, sequence=128, vocabulary=4096))
MICRO_BATCHES = 8
PEER = "Megatron-core interleaved, one group"
"""The peer that has our order except at the turn-around."""


def run(layout: Layout = LAYOUT, micro_batches: int = MICRO_BATCHES, repetitions: int = REPETITIONS) -> Record:
    """Measures every contender that keeps its parameters, with and without recomputation of every block."""
    record = begin(NAME)
    for recompute in (True, False):
        contenders = in_training(layout, recompute)[KEPT]
        counted = count(contenders, layout, (micro_batches,), memory=True, repetitions=repetitions)
        name = "full" if recompute else "none"
        for contender, on_ranks in counted.items():
            enter(record, contender, layout, on_ranks, recompute=name)
        peaks = {row.contender: row.median for row in record.rows if row.config["recompute"] == name}
        own = peaks[f"{OURS}, ZeRO-1"]
        record.aim(f"peak of {OURS} / of {PEER}, recompute {name}", own / peaks[PEER], 1.0)
    return record
