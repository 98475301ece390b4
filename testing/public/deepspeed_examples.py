"""Runs DeepSpeedExamples' training/pipeline_parallelism/train.py: AlexNet in a pipeline.

A stand-in replaces torchvision, which would download CIFAR-10. It has random images, and the AlexNet of the example's
own folder without dropout.
"""

from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

from testing.public.deepspeed_scripts import losses_of
from testing.public.outcome import Case, compared, without_block

RANKS, STEPS = 2, 4
BLOCK = {"chunks_per_rank": 3, "placement": "modular"}


def cases(tree: Path, folder: Path) -> Iterable[Case]:
    """Returns the cases on two pipeline ranks at ZeRO stages 0 and 3. Stock trains at stage 1."""
    script = tree / "training" / "pipeline_parallelism" / "train.py"

    def train(stage: int, block: dict[str, Any]) -> list[float]:
        config = {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            # At this rate rounding differences stay small.
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "eps": 1e-6, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            **block,
        }
        return losses_of(script, RANKS, ["--steps", str(STEPS), "-p", "2", "--backend", "gloo"], config)

    def compare(stage: int) -> str:
        alone = without_block(stock)
        return compared(train(stage, {"ds_lgamp": BLOCK}), alone)

    stock = cache(lambda: train(1, {}))
    for stage in (0, 3):
        yield Case(f"P2, ZeRO-{stage}, random images, no dropout", partial(compare, stage))
