"""Which attention a model of transformers computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def attending_anywhere(model: Any) -> Iterator[None]:
    """Switches the model inside the block to an attention that runs on every device and dtype, and on inputs of any
    size. Flash attention does not, nor does one that DeepSpeed's Ulysses has put into the place of another."""
    configs = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}.values()
    own = [getattr(config, "_attn_implementation_internal", None) for config in configs]
    anywhere = ("sdpa", "eager") if _is_own("sdpa") else ("eager",)
    for config, name in zip(configs, own):
        if name is not None and name not in anywhere:
            config._attn_implementation_internal = anywhere[0] if model._supports_sdpa else "eager"
    try:
        yield
    finally:
        for config, name in zip(configs, own):
            if name is not None:
                config._attn_implementation_internal = name


def _is_own(name: str) -> bool:
    """Whether an attention of transformers is the one that it came with."""
    # Here, because importing transformers takes seconds, and only its models need it.
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[name].__module__.startswith("transformers.")
