"""The output of a model in training."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.utils import ModelOutput

from ds_lgamp.config import BLOCK


@dataclass
class TrainingOutput(ModelOutput):
    """The loss of a micro-batch. Everything else of a model's output stays on the rank that computed it."""

    loss: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"with a {BLOCK} block the output of a training step has only 'loss', not '{name}'")
