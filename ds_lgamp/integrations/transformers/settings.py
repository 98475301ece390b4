"""Settings of transformers: those that a forward sets, and those that do not hold while layers compute."""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ds_lgamp.config import BLOCK
from ds_lgamp.integrations.hosts import replace_attribute

Setting = str | int | float | bool | None


class ForwardSettings:
    """The plain values of a configuration that a forward sets. Only ranks that run the code after the blocks see that.

    Args:
        config: the configuration, before any forward.
    """

    def __init__(self, config: Any) -> None:
        self._config, self._before = config, _plain(config)

    def changed(self) -> dict[str, Setting]:
        """Returns the values by name that were set since this object was made."""
        missing = object()
        return {name: value for name, value in _plain(self._config).items() if self._before.get(name, missing) != value}

    def take(self, changed: Mapping[str, Setting]) -> None:
        """Sets what a forward has set on another rank."""
        for name, value in changed.items():
            setattr(self._config, name, value)


def _plain(config: Any) -> dict[str, Setting]:
    return {
        name: value for name, value in vars(config).items() if not name.startswith("_") and isinstance(value, Setting)
    }


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


logger = logging.getLogger(__name__)


class OwnCheckpointing:
    """The model's own activation checkpointing, which scripts may enable at any time."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[Any] = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self._has_logged = False

    def switch_off(self) -> None:
        """Switches it off. Logs that once."""
        enabled = [module for module in self._modules if module.gradient_checkpointing]
        for module in enabled:
            module.gradient_checkpointing = False
        if enabled and not self._has_logged:
            self._has_logged = True
            logger.warning(
                f"the model's activation checkpointing is switched off: {BLOCK}.recompute decides what is recomputed"
            )


@contextmanager
def whole_to_layers() -> Iterator[None]:
    """Inside the block, transformers' ``is_deepspeed_zero3_enabled`` returns False, because layers get whole weights.

    If it returned True, code such as the fused heads of trl would read the attributes of a ZeRO-3 parameter from a
    weight. In a backward pass the weight is a tensor without them, which autograd makes of a parameter that it saved
    through hooks.
    """
    with ExitStack() as undo:
        module = sys.modules.get("transformers.integrations.deepspeed")
        if module is not None:
            # What the function reads, which others have imported by name.
            replace_attribute(module, "_hf_deepspeed_config_weak_ref", None, undo)
        yield
