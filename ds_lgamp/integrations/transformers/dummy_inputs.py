"""Arguments for the small forward that surveys a model."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def inputs_of(model: Any) -> Mapping[str, Tensor]:
    """Returns arguments that the forward of ``model``, which is one of transformers, takes: its ``dummy_inputs``. Of
    those that transformers gives to every model, one row, with one choice if the model chooses between several."""
    # Here, because importing transformers takes seconds, and only its models need it.
    from transformers import PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES

    inputs = model.dummy_inputs
    if type(model).dummy_inputs is not PreTrainedModel.dummy_inputs:
        return inputs
    # Several rows need a padding token in a head that classifies the last token.
    rows = {name: value[:1] for name, value in inputs.items()}
    choosing = set(MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES.values())
    if choosing.isdisjoint(each.__name__ for each in type(model).__mro__):
        return rows
    return {name: value[None] for name, value in rows.items()}
