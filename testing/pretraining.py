"""Megatron-LM's pretrain_gpt.py, unedited, as tests start it: a tiny GPT on the CPU and gloo."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from testing.launching import torchrun

LAYERS, MICRO_BATCHES = 8, 8
"""The micro-batches are those of all data-parallel ranks."""
ITERATIONS, EVALUATED_EVERY = 20, 10

# The mock data's tokens are numbers below 4096; the tokenizer adds one to the vocabulary, which no tensor-parallel size
# up to 32 then pads: padding would take part in the loss.
MODEL = f"""
    --num-layers {LAYERS} --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --attention-dropout 0 --hidden-dropout 0 --mock-data --split 90,5,5 --tokenizer-type NullTokenizer --vocab-size 4095
    --num-workers 0 --micro-batch-size 2 --global-batch-size {2 * MICRO_BATCHES}
"""
# The usual epsilon of Adam would make differences of rounding large.
TRAINING = f"""
    --train-iters {ITERATIONS} --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1
    --adam-eps 1e-4
    --log-interval 1 --eval-interval {EVALUATED_EVERY} --eval-iters 1 --ckpt-format torch_dist
"""
# Without CUDA, Apex and Transformer Engine.
PLATFORM = """
    --distributed-backend gloo --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
"""


PIPELINE = "--pipeline-model-parallel-size 2"
DISTRIBUTED_OPTIMIZER = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
PLACES = {
    "P1 x N4": (1, ""),
    "P2 x N4": (2, PIPELINE),
    "P2 x W2": (4, f"{PIPELINE} {DISTRIBUTED_OPTIMIZER}"),
    "T2 x P2": (4, f"{PIPELINE} --tensor-model-parallel-size 2"),
}
"""Ranks and flags: pipeline, data-parallel and tensor-parallel ranks, with a block of four chunks on each."""
STOCK_CHUNKS = (
    f"--num-virtual-stages-per-pipeline-rank {LAYERS // 2} "
    f"--microbatch-group-size-per-virtual-pipeline-stage {MICRO_BATCHES}"
)
"""With which Megatron-core has the chunks of "P2 x N4", and its order of work is nearest to the layered one."""


class Losses(NamedTuple):
    """By iteration, as the last rank wrote them for TensorBoard: to the last bit of float32. Without the evaluations
    after training, which Megatron-LM leaves unflushed."""

    training: dict[int, float]
    validation: dict[int, float]


def megatron_tree() -> Path:
    """The Megatron-LM tree that MEGATRON_LM_PATH names; without one, the test is skipped."""
    tree = os.environ.get("MEGATRON_LM_PATH")
    if not tree:
        pytest.skip("MEGATRON_LM_PATH is not set; it names a Megatron-LM tree of the branch core_r0.16.0")
    return Path(tree)


def pretrain(
    ranks: int, flags: str = "", launcher: str = "", script: str = "pretrain_gpt.py", model: str = MODEL
) -> Losses:
    """The losses of :func:`trained`."""
    scalars = trained(ranks, flags, launcher, script=script, model=model)
    return Losses(*(scalars.get(tag, {}) for tag in ("lm loss", "lm loss validation")))


def trained(
    ranks: int,
    flags: str = "",
    launcher: str = "",
    training: str = TRAINING,
    seconds: float = 240,
    script: str = "pretrain_gpt.py",
    model: str = MODEL,
) -> dict[str, dict[int, float]]:
    """Trains on ``ranks`` processes with ``model``, ``training`` and ``flags`` beside those above; returns what
    TensorBoard gets, by tag and iteration.

    ``launcher`` comes before the script, such as "-m ds_lgamp run". Raises AssertionError with the output of a run that
    fails or takes longer than ``seconds``.
    """
    script = str(megatron_tree() / script)
    words = ["-m", "testing.cpu_shim", *launcher.split(), script, *f"{model} {training} {PLATFORM} {flags}".split()]
    with tempfile.TemporaryDirectory() as events:
        torchrun(ranks, [*words, "--tensorboard-dir", events], seconds)
        return _scalars(events)


def pretrain_with_block(place: str, flags: str, folder: Path, **block: Any) -> Losses:
    """Trains at ``place`` with a block of four chunks on a rank and what ``block`` says; ``folder`` gets its file."""
    ranks, own_flags = PLACES[place]
    return pretrain(ranks, f"{flags} {own_flags} {block_flag(own_flags, folder, **block)}", "-m ds_lgamp run")


def block_flag(flags: str, folder: Path, **block: Any) -> str:
    """The option that names a file with a block, which goes to ``folder``."""
    stage = int("--use-distributed-optimizer" in flags)
    path = folder / "ds_config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": stage}, "ds_lgamp": {"chunks_per_rank": 4, **block}}))
    return f"--ds-lgamp-config {path}"


def _scalars(folder: str) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(folder)
    events.Reload()
    scalars: dict[str, dict[int, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            scalars.setdefault(tag, {}).setdefault(event.step, event.value)
    return scalars
