"""Runs Megatron-LM's pretrain_gpt.py: a shorter training of testing/pretraining.py, with several sets of flags."""

import json
import os
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from testing.pretraining import DISTRIBUTED_OPTIMIZER, MICRO_BATCHES, PIPELINE, trained
from testing.public.outcome import Case, compared, without_block

TRAINING = """
    --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --weight-decay 0.1 --adam-eps 1e-4
    --log-interval 1 --eval-interval 100 --eval-iters 1
"""
LENGTH = "--train-iters 8"
CHUNKS = 4
TAGS = ("lm loss", "grad-norm")
TOLERANCE = 1e-5
LLAMA = (
    "--position-embedding-type rope --no-rope-fusion --swiglu --normalization RMSNorm --disable-bias-linear "
    "--group-query-attention --num-query-groups 2"
)


class Flags(NamedTuple):
    """A set of flags for runs with and without a block."""

    ranks: int
    flags: str
    stage: int = 0
    length: str = LENGTH
    interleaved: bool = True
    """Whether stock runs with the block's chunks, so that both draw the same weights. Otherwise both load a
    checkpoint."""
    with_block: str = ""
    """Flags only for the run with a block. They change no number, but stock pipelines handle them wrongly."""

    @property
    def stock_chunks(self) -> str:
        if not self.interleaved:
            return ""
        micro_batches = MICRO_BATCHES * 2 // self.ranks
        return (
            f"--num-virtual-stages-per-pipeline-rank {CHUNKS} "
            f"--microbatch-group-size-per-virtual-pipeline-stage {micro_batches}"
        )


SETS = {
    "P2": Flags(2, ""),
    "P2 x W2, distributed optimizer with overlap": Flags(4, DISTRIBUTED_OPTIMIZER, 1),
    "P2 x W4, two instances of the distributed optimizer beside stock's one": Flags(
        8, DISTRIBUTED_OPTIMIZER, 1, with_block="--num-distributed-optimizer-instances 2"
    ),
    "P2, iterations to skip": Flags(2, "--iterations-to-skip 3 5", interleaved=False),
    "P2, rope, SwiGLU, RMSNorm, grouped queries": Flags(2, LLAMA),
    "P2, full recomputation": Flags(
        2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "P2, ramp-up of the batch": Flags(2, "--rampup-batch-size 4 4 32", length="--train-samples 96", interleaved=False),
}


def cases(tree: Path, folder: Path) -> Iterable[Case]:
    """Returns the cases of all sets of flags on two pipeline ranks. Both runs start from the same weights and compare
    losses and gradient norms."""
    os.environ["MEGATRON_LM_PATH"] = str(tree)
    weights = folder / "weights"

    @cache
    def start() -> str:
        saving = f"--save {weights} --save-interval 1 --exit-interval 1"
        without_block(partial(trained, 1, saving, training=f"{TRAINING} {LENGTH}"))
        return f"--load {weights} --finetune"

    for number, (name, flags) in enumerate(SETS.items()):
        yield Case(name, partial(compare, flags, folder / f"{number}.json", start))


def compare(flags: Flags, path: Path, start: Callable[[], str]) -> str:
    """Trains without and with a block and compares. ``path`` is the file of the block."""
    path.write_text(json.dumps({"zero_optimization": {"stage": flags.stage}, "ds_lgamp": {"chunks_per_rank": CHUNKS}}))
    common = f"{PIPELINE} {flags.flags} {'' if flags.interleaved else start()}"
    training = f"{TRAINING} {flags.length}"
    stock = without_block(partial(trained, flags.ranks, f"{common} {flags.stock_chunks}", training=training))
    ours = trained(flags.ranks, f"{common} {flags.with_block} --ds-lgamp-config {path}", "-m ds_lgamp run", training)
    found = {tag: compared(list(ours[tag].values()), list(stock[tag].values()), TOLERANCE) for tag in TAGS}
    return next((f"{text} ({tag})" for tag, text in found.items() if text.startswith("differs")), found[TAGS[0]])
