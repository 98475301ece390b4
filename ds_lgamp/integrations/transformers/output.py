"""The output of a model in training."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.utils import ModelOutput

from ds_lgamp.integrations.split.outputs import NotInTraining


@dataclass
class TrainingOutput(ModelOutput):
    """The loss of a micro-batch. Everything else of a model's output stays on the rank that computed it."""

    loss: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        raise NotInTraining(f"'loss', not '{name}'")

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str) and key not in self:
            raise NotInTraining(f"'loss', not '{key}'")
        return super().__getitem__(key)

    def get(self, key: Any, *default: Any) -> Any:
        """As a dictionary's. Raises NotInTraining for a missing key if the caller expects it, and gives no default."""
        return super().get(key, *default) if default else self[key]
