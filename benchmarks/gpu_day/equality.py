"""The small GPT that parts of the day train, and how its losses are compared with plain torch's."""

import re
import traceback
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from benchmarks.gpt.contenders import PlainTorch, Training
from benchmarks.gpt.sizes import SIZES, TINY, GptSize
from benchmarks.gpu import LOSS_TOLERANCE, deviation

STEPS = 5
PRECISIONS = {"fp32": (torch.float32, 1e-5), "bf16": (torch.bfloat16, LOSS_TOLERANCE)}
"""By name: data type of the weights, and the largest relative difference of losses."""
ERROR = re.compile(r"^[\w.]+: .*", re.MULTILINE)
"""The line of an error in a traceback."""


def size() -> GptSize:
    """Returns a size of which a step takes milliseconds on a GPU; a tiny one on the CPU. Four micro-batches can be
    shared by two data-parallel ranks."""
    if get_accelerator().device_name() == "cpu":
        return SIZES[TINY]._replace(micro_batches=4)
    return GptSize(layers=4, width=512, heads=8, samples=2, micro_batches=4, sequence=512, vocabulary=4096)


def device() -> torch.device:
    return torch.device(get_accelerator().current_device_name())


def losses_of(training: Training) -> list[float]:
    """Trains some steps. Returns the loss of each."""
    return [float(training.step()) for _ in range(STEPS)]


def expected_losses(precision: str) -> list[float]:
    """Losses of plain torch in this process."""
    return losses_of(PlainTorch(size(), "none", device(), PRECISIONS[precision][0]))


def compared(losses: list[float], expected: list[float], precision: str) -> dict[str, Any]:
    """Returns the losses with their largest relative difference, and a failure if it is too large."""
    difference = max(abs(loss - right) / right for loss, right in zip(losses, expected, strict=True))
    failure = deviation(losses, expected, PRECISIONS[precision][1])
    return {"losses": losses, "largest difference": difference, **({"failure": failure} if failure else {})}


def caught(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what ``measure`` does, or its error as a failure, so that what comes next is still measured."""
    try:
        return measure()
    except Exception as error:
        return {"failure": error_in(f"{type(error).__name__}: {error}"), "error": traceback.format_exc()}


def error_in(text: str) -> str:
    """Returns the line that names the cause. An error of ranks has one rank's traceback in its text, and the line is
    its last error."""
    found = ERROR.findall(text)
    return found[-1] if found else text
