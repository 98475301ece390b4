"""What transformers and peft make of a model."""

import sys
from inspect import signature
from typing import Any

from ds_lgamp.integrations.split.parts import model_of


def is_model(model: Any) -> bool:
    """Returns whether ``model`` is one of transformers, perhaps wrapped by peft."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model_of(model), transformers.PreTrainedModel)


def without_cache(model: Any) -> dict[str, Any]:
    """Returns the arguments that keep the model's forward from caching keys and values."""
    own = model_of(model)
    parameters = signature(own.forward).parameters
    # Some heads, and models of images and text, pass all other arguments on to a model that caches.
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    passed_on = takes_all and hasattr(own.config.get_text_config(), "use_cache")
    return {"use_cache": False} if "use_cache" in parameters or passed_on else {}


def planned_names(model: Any) -> set[str]:
    """Returns the names in the pipeline plan of the model's configuration."""
    config = getattr(model, "config", None)
    return set(getattr(config, "base_model_pp_plan", None) or ())
