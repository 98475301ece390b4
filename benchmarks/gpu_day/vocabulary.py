"""A vocabulary of 128k and 32k tokens per micro-batch: head and loss at once, or in pieces of rows that never make all
logits; the GPT of Megatron-core's layers, and a Llama of transformers in a loop of its own."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

from benchmarks.gpt.contenders import BASELINE, Contender, Layered, PlainTorch
from benchmarks.gpt.llama import LayeredLlama, PlainLlama
from benchmarks.gpt.sizes import SIZES, TINY, GptSize
from benchmarks.gpu import Trial
from benchmarks.gpu_day.beside import SECONDS, compared
from benchmarks.record import OURS

SIZE = GptSize(4, 2048, 16, samples=4, micro_batches=2, sequence=8192, vocabulary=128_256)
ROWS = 2048
"""Rows of a piece. On the CPU, a few."""
WHOLE, PIECES = "whole logits", "pieces of rows"


MODELS = {"GPT": (PlainTorch, Layered), "Llama": (PlainLlama, LayeredLlama)}
"""How plain torch and ds_lgamp train each."""


def run(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    on_cpu = get_accelerator().device_name() == "cpu"
    size, rows = (SIZES[TINY], 8) if on_cpu else (SIZE, ROWS)
    for model in MODELS:
        trainings = [(contender, {"full": Trial(size, "full")}) for contender in contenders(model, rows)]
        yield from compared(trainings, SECONDS / len(MODELS))


def contenders(model: str, rows: int) -> Iterator[Contender]:
    """Yields plain torch, and ds_lgamp with and without pieces."""
    plain, layered = MODELS[model]
    yield Contender(f"{BASELINE}, {model}", plain)
    for name, number in ((PIECES, rows), (WHOLE, 0)):
        more = {"ds_lgamp": {"loss_chunk": number}}
        yield Contender(f"{OURS}, {model}, {name}", partial(layered, stage=3, more=more))
