"""All architectures of transformers with a pipeline plan, made small."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto as auto

from tests.integrations.transformers.models import micro_batch
from tests.integrations.transformers.shrink import small

_HEADS = (
    auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    auto.MODEL_FOR_MASKED_LM_MAPPING,
    auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    auto.MODEL_MAPPING,
)


def planned_configs() -> list[Any]:
    """Returns the classes of configurations that define a pipeline plan, in the order of their files."""
    found = []
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/configuration_*.py")):
        if "base_model_pp_plan" not in file.read_text():
            continue
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        found += [
            value
            for value in vars(module).values()
            if inspect.isclass(value) and value.__module__ == module.__name__ and _has_plan(value)
        ]
    return found


def model_with_plan(config_class: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Returns a small model, with a head if there is one, and a micro-batch for it. Raises what transformers raises if
    it cannot be made so."""
    model_class = _model_class(config_class)
    torch.manual_seed(0)
    model = model_class(small(config_class))
    batch = micro_batch(0, 0, 0)
    parameters = inspect.signature(model.forward).parameters
    if "labels" not in parameters:
        del batch["labels"]
    elif "SequenceClassification" in model_class.__name__:
        batch["labels"] = torch.tensor([0, 1])
    return model, batch


def _has_plan(value: Any) -> bool:
    return issubclass(value, transformers.PreTrainedConfig) and bool(value.base_model_pp_plan)


def _model_class(config_class: Any) -> Any:
    for mapping in _HEADS:
        if config_class in mapping:
            found = mapping[config_class]
            return found[0] if isinstance(found, tuple) else found
    module = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
    return next(
        value
        for name, value in vars(module).items()
        if getattr(value, "config_class", None) is config_class and not name.endswith("PreTrainedModel")
    )
