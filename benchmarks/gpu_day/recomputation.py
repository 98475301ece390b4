"""The 1.3 B GPT with as little recomputation as 40 GB allow, with full and with none, beside plain torch and FSDP2."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

from benchmarks.gpt.contenders import BASELINE, Contender, Layered, PlainTorch
from benchmarks.gpt.offload import FSDP2_IN_MEMORY, Fsdp2
from benchmarks.gpt.sizes import SIZES, TINY
from benchmarks.gpu import Trial
from benchmarks.gpu_day.beside import compared
from benchmarks.record import OURS

BUDGET = "40 GB"
"""Beside the 28 GB of full recomputation and the 75 GB of none."""
WITHIN, FIXED = f"{OURS}, within {BUDGET}", f"{OURS}, ZeRO-3"
_KEYS = {"ds_lgamp": {"recompute_memory": BUDGET}}
TRAININGS = (
    (Contender(BASELINE, PlainTorch), ("none", "full")),
    (Contender(WITHIN, partial(Layered, stage=3, more=_KEYS)), ("auto",)),
    (Contender(FIXED, partial(Layered, stage=3)), ("full", "none")),
    (Contender(FSDP2_IN_MEMORY, partial(Fsdp2, offload=False)), ("none", "operators", "half", "full")),
)
"""Contenders, each with its kinds of recomputation."""


def run(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    size = SIZES[TINY if get_accelerator().device_name() == "cpu" else "1.3B"]
    yield from compared((contender, {kind: Trial(size, kind) for kind in kinds}) for contender, kinds in TRAININGS)
