"""Megatron-LM's pretrain_gpt.py: the training of testing/pretraining.py, shorter and under several sets of flags."""

import json
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from testing.pretraining import DISTRIBUTED_OPTIMIZER, MICRO_BATCHES, PIPELINE, trained
from testing.public.outcome import Case, compared

TRAINING = """
    --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --weight-decay 0.1 --adam-eps 1e-4
    --log-interval 1 --eval-interval 100 --eval-iters 1
"""
LENGTH = "--train-iters 8"
TAGS = ("lm loss", "grad-norm")
TOLERANCE = 1e-5
LLAMA = (
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--group-query-attention --num-query-groups 2"
)


class Flags(NamedTuple):
    """A set of flags, the same with a block and without."""

    ranks: int
    flags: str
    stage: int = 0
    chunks: int = 4
    length: str = LENGTH

    @property
    def stock_chunks(self) -> str:
        """Stock's interleaved schedule with the chunks of the block, whose weights are then drawn alike."""
        if self.chunks == 1:
            return ""
        return (
            f"--num-virtual-stages-per-pipeline-rank {self.chunks} "
            f"--microbatch-group-size-per-virtual-pipeline-stage {MICRO_BATCHES // self.data_ranks}"
        )

    @property
    def data_ranks(self) -> int:
        return self.ranks // 2


SETS = {
    "P2": Flags(2, ""),
    "P2 x W2, distributed optimizer with overlap": Flags(4, DISTRIBUTED_OPTIMIZER, 1),
    "P2 x W4, two instances of the distributed optimizer": Flags(
        8, f"{DISTRIBUTED_OPTIMIZER} --num-distributed-optimizer-instances 2", 1
    ),
    "P2, iterations to skip": Flags(2, "--iterations-to-skip 3 5"),
    "P2, rope, SwiGLU, RMSNorm, grouped queries": Flags(2, LLAMA),
    "P2, full recomputation": Flags(
        2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "P2, ramp-up of the batch": Flags(2, "--rampup-batch-size 4 4 32", chunks=1, length="--train-samples 96"),
}


def cases(tree: Path, folder: Path) -> Iterable[Case]:
    """Each set of flags on two pipeline ranks, from the same weights: losses and norms of gradients."""
    os.environ["MEGATRON_LM_PATH"] = str(tree)
    for number, (name, flags) in enumerate(SETS.items()):
        yield Case(name, partial(compare, flags, folder / f"{number}.json"))


def compare(flags: Flags, path: Path) -> str:
    """Trains without a block and with one, whose file is ``path``."""
    path.write_text(
        json.dumps({"zero_optimization": {"stage": flags.stage}, "ds_lgamp": {"chunks_per_rank": flags.chunks}})
    )
    common = f"{PIPELINE} {flags.flags}"
    training = f"{TRAINING} {flags.length}"
    stock = trained(flags.ranks, f"{common} {flags.stock_chunks}", training=training)
    ours = trained(flags.ranks, f"{common} --ds-lgamp-config {path}", "-m ds_lgamp run", training)
    found = {tag: compared(list(ours[tag].values()), list(stock[tag].values()), TOLERANCE) for tag in TAGS}
    return next((f"{text} ({tag})" for tag, text in found.items() if text.startswith("differs")), found[TAGS[0]])
