"""The README's table of situations: ours beside the best peer, from recorded runs."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.gpu_day.findings import NAME as GPU_DAY
from benchmarks.gpu_day.findings import RATE
from benchmarks.record import OURS, Row, read
from benchmarks.training import LOOPBACK
from benchmarks.training_slow import SLOW
from testing.markdown import table

_ONE_BY_TWO = {"pipeline_ranks": 1, "data_ranks": 2}


class Situation(NamedTuple):
    """What a reader has, and the recorded rows that show what ds_lgamp changes."""

    words: str
    page: str
    """Where the whole table stands."""
    record: str
    metric: str
    form: str
    """Of a number and its unit."""
    ours: str
    chosen: Mapping[str, Any]
    """What the configurations of the rows have."""
    without: Sequence[str] = ()
    """Peers that do something else."""
    factor: float = 1.0
    """What the unit of the form is in the record's."""
    gain: str = "{:.1f} times as fast"

    def line(self) -> list[str]:
        """Returns the cells of the table."""
        rows = [row for row in read(self.record).rows if row.metric == self.metric and self._has(row)]
        own = next(row for row in rows if row.contender == self.ours)
        more_is_better = self.metric == RATE
        peers = [row for row in rows if not row.contender.startswith(OURS) and row.contender not in self.without]
        best = (max if more_is_better else min)(peers, key=lambda row: row.median)
        ratio = own.median / best.median if more_is_better else best.median / own.median
        return [
            f"[{self.words}]({self.page})",
            self._shown(own),
            f"{self._shown(best)}: {best.contender}",
            self.gain.format(ratio),
        ]

    def _has(self, row: Row) -> bool:
        return all(row.config.get(key) == value for key, value in self.chosen.items())

    def _shown(self, row: Row) -> str:
        return self.form.format(row.median * self.factor)


SITUATIONS = (
    Situation(
        "ZeRO-3 with few samples per GPU: bytes of a step",
        "docs/benchmarks.md#communication",
        "communication",
        "collective_bytes",
        "{:.1f} MB",
        f"{OURS}, ZeRO-3, 2 resident",
        {**_ONE_BY_TWO, "micro_batches": 8},
        # These hold more, or do not share the parameters.
        ("FSDP2, kept unsharded", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-2, coalesced reduction"),
        1e-6,
        "{:.1f} times fewer",
    ),
    Situation(
        "The same at 200 Mbit/s",
        "docs/benchmarks.md#training-over-a-slow-network",
        "training_slow",
        "step",
        "{:.2f} s",
        f"{OURS}, ZeRO-3",
        {**_ONE_BY_TWO, "link": SLOW, "parameters": "sharded"},
    ),
    Situation(
        "LoRA under ZeRO-3 at 200 Mbit/s",
        "docs/benchmarks.md#adapters",
        "adapters",
        "step",
        "{:.2f} s",
        f"{OURS}, keep_frozen host",
        {"micro_batches": 8, "link": SLOW},
    ),
    Situation(
        "Experts that ranks divide, 16 micro-batches, at 200 Mbit/s",
        "docs/benchmarks.md#divided-experts",
        "divided_experts",
        "step",
        "{:.2f} s",
        f"{OURS} ZeRO-3",
        {**_ONE_BY_TWO, "micro_batches": 16, "link": SLOW},
    ),
    Situation(
        "Two pipelines of two ranks with ZeRO-3 at 200 Mbit/s",
        "docs/benchmarks.md#training-over-a-slow-network",
        "training_slow",
        "step",
        "{:.2f} s",
        f"{OURS}, ZeRO-3",
        {"pipeline_ranks": 2, "data_ranks": 2, "link": SLOW, "parameters": "sharded"},
    ),
    Situation(
        "A pipeline of four ranks: idle time of a rank",
        "docs/benchmarks.md#backwards-in-two-parts",
        "zero_bubble",
        "idle per rank",
        "{:.0f} ms",
        f"{OURS} layered, two parts",
        {"micro_batches": 8, "link": LOOPBACK},
        gain="{:.1f} times less",
    ),
    Situation(
        "One GPU, with weights and state on the host",
        "docs/offload.md#on-one-gpu",
        GPU_DAY,
        RATE,
        "{:,.0f} tokens/s",
        f"{OURS}, all on the host",
        {"part": "offload", "micro_batches": 16},
        ("FSDP2, all on the device",),
    ),
    Situation(
        "A fast link, and ranks that hold everything",
        "docs/benchmarks.md#training-steps",
        "training",
        "step",
        "{:.2f} s",
        f"{OURS}, ZeRO-1",
        {**_ONE_BY_TWO, "link": LOOPBACK, "parameters": "kept", "recompute": "full", "width": 1024},
        gain="{:.2f} times as fast",
    ),
)


def situations() -> str:
    """Returns the table: what ds_lgamp and its best peer take in each situation."""
    return table(["your situation", OURS, "best peer", "gain"], [each.line() for each in SITUATIONS], numbers_from=4)
