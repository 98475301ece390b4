"""Which attention a model of transformers computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def attending_anywhere(model: Any) -> Iterator[None]:
    """Switches the model inside the block to an attention that runs on every device and dtype. Flash attention does
    not."""
    configs = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}.values()
    own = [getattr(config, "_attn_implementation_internal", None) for config in configs]
    for config, name in zip(configs, own):
        if name not in (None, "eager", "sdpa"):
            config._attn_implementation_internal = "sdpa" if model._supports_sdpa else "eager"
    try:
        yield
    finally:
        for config, name in zip(configs, own):
            if name is not None:
                config._attn_implementation_internal = name
