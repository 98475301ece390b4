"""Starts Megatron-LM's unedited pretrain_gpt.py for tests: a tiny GPT on the CPU and gloo."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from testing.launching import torchrun

LAYERS, MICRO_BATCHES = 8, 8
"""Micro-batches of all data-parallel ranks together."""
ITERATIONS, EVALUATED_EVERY = 20, 10

# The mock data's tokens are numbers below 4096. The tokenizer adds one to the vocabulary size, so that no
# tensor-parallel size up to 32 pads it. Padding would take part in the loss.
MODEL = f"""
    --num-layers {LAYERS} --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --attention-dropout 0 --hidden-dropout 0 --mock-data --split 90,5,5 --tokenizer-type NullTokenizer --vocab-size 4095
    --num-workers 0 --micro-batch-size 2 --global-batch-size {2 * MICRO_BATCHES}
"""
# Adam's usual epsilon would amplify rounding differences.
TRAINING = f"""
    --train-iters {ITERATIONS} --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1
    --adam-eps 1e-4
    --log-interval 1 --eval-interval {EVALUATED_EVERY} --eval-iters 1 --ckpt-format torch_dist
"""
# Runs without CUDA, Apex and Transformer Engine.
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
"""Ranks and flags by pipeline, data-parallel and tensor-parallel ranks. A block has four chunks on each."""
STOCK_CHUNKS = (
    f"--num-virtual-stages-per-pipeline-rank {LAYERS // 2} "
    f"--microbatch-group-size-per-virtual-pipeline-stage {MICRO_BATCHES}"
)
"""Gives Megatron-core the chunks of "P2 x N4" and the order of work that is closest to the layered one."""


class Losses(NamedTuple):
    """Losses by iteration, exact in float32, as the last rank wrote them for TensorBoard.

    Evaluations after training are missing, because Megatron-LM does not flush them.
    """

    training: dict[int, float]
    validation: dict[int, float]


def assert_close(losses: Losses, reference: Losses, tolerance: float = 1e-6) -> None:
    assert losses.training == pytest.approx(reference.training, rel=tolerance)
    assert losses.validation == pytest.approx(reference.validation, rel=tolerance)


def after_the_checkpoint(losses: Losses) -> Losses:
    return Losses(*({at: loss for at, loss in kind.items() if at > EVALUATED_EVERY} for kind in losses))


def go_back(folder: Path) -> None:
    """Makes the checkpoint of the evaluated iteration the latest in a folder."""
    (folder / "latest_checkpointed_iteration.txt").write_text(str(EVALUATED_EVERY))


def megatron_tree() -> Path:
    """Returns the Megatron-LM tree that MEGATRON_LM_PATH names. Skips the test without one."""
    tree = os.environ.get("MEGATRON_LM_PATH")
    if not tree:
        pytest.skip("MEGATRON_LM_PATH is not set; it names a Megatron-LM tree of the branch core_r0.16.0")
    return Path(tree)


def has_flag(flag: str) -> bool:
    """Whether the tree is of a release that has ``flag``."""
    argument = flag.removeprefix("--").replace("-", "_")
    written = (path.read_text() for path in (megatron_tree() / "megatron" / "training").rglob("*.py"))
    return any(flag in text or f" {argument}:" in text for text in written)


def pretrain(
    ranks: int,
    flags: str = "",
    launcher: str = "",
    script: str = "pretrain_gpt.py",
    model: str = MODEL,
    seconds: float = 240,
) -> Losses:
    """Returns the losses of :func:`trained`."""
    return losses_of(trained(ranks, flags, launcher, seconds=seconds, script=script, model=model))


def start_in(folder: Path) -> str:
    """Returns flags that start every run from the same weights, which it saves in ``folder``. Freshly drawn weights
    would differ by pipeline rank."""
    megatron_tree()
    pretrain(1, f"--save {folder} --save-interval 1 --exit-interval 1")
    return f"--load {folder} --finetune"


def trained(
    ranks: int,
    flags: str = "",
    launcher: str = "",
    training: str = TRAINING,
    seconds: float = 240,
    script: str = "pretrain_gpt.py",
    model: str = MODEL,
) -> dict[str, dict[int, float]]:
    """Trains on ``ranks`` processes. Returns the values written for TensorBoard, by tag and iteration.

    Args:
        ranks: number of processes.
        flags: flags to add.
        launcher: words before the script, such as "-m ds_lgamp run".
        training: flags of the training.
        seconds: time limit.
        script: script of the Megatron-LM tree.
        model: flags of the model.

    Raises AssertionError with the output of a run that fails or takes longer than ``seconds``.
    """
    with tempfile.TemporaryDirectory() as events:
        torchrun(ranks, words_of(flags, events, launcher, training, script, model), seconds)
        return scalars_of(events)


def words_of(
    flags: str,
    events: str,
    launcher: str = "",
    training: str = TRAINING,
    script: str = "pretrain_gpt.py",
    model: str = MODEL,
) -> list[str]:
    """Returns the words after the launcher of ranks in :func:`trained`. The run writes for TensorBoard into the folder
    ``events``."""
    path = str(megatron_tree() / script)
    words = ["-m", "testing.cpu_shim", *launcher.split(), path, *f"{model} {training} {PLATFORM} {flags}".split()]
    return [*words, "--tensorboard-dir", events]


def pretrain_with_block(place: str, flags: str, folder: Path, **block: Any) -> Losses:
    """Trains at ``place`` with a block of four chunks per rank and the keys of ``block``. Writes the block's file to
    ``folder``."""
    ranks, own_flags = PLACES[place]
    return pretrain(ranks, f"{flags} {own_flags} {block_flag(own_flags, folder, **block)}", "-m ds_lgamp run")


def block_flag(flags: str, folder: Path, stage: int | None = None, **block: Any) -> str:
    """Writes a file with a block to ``folder`` and returns the option that names it. By default, the ``stage`` follows
    the ``flags``."""
    stage = int("--use-distributed-optimizer" in flags) if stage is None else stage
    path = folder / "ds_config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": stage}, "ds_lgamp": {"chunks_per_rank": 4, **block}}))
    return f"--ds-lgamp-config {path}"


def losses_of(scalars: dict[str, dict[int, float]]) -> Losses:
    """Returns the losses among what :func:`trained` returns."""
    return Losses(*(scalars.get(tag, {}) for tag in ("lm loss", "lm loss validation")))


def scalars_of(folder: str) -> dict[str, dict[int, float]]:
    """Returns the values that a run has written for TensorBoard, by tag and iteration."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(folder)
    events.Reload()
    scalars: dict[str, dict[int, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            scalars.setdefault(tag, {}).setdefault(event.step, event.value)
    return scalars
