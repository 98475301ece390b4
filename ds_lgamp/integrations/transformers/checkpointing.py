"""Switches the activation checkpointing of transformers off, because chunks are recomputed by the engine."""

import logging
from typing import Any

from torch import nn

from ds_lgamp.config import BLOCK

logger = logging.getLogger(__name__)


class OwnCheckpointing:
    """The model's own activation checkpointing, which scripts may enable at any time."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[Any] = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self._told = False

    def switch_off(self) -> None:
        """Switches it off. Logs that once."""
        enabled = [module for module in self._modules if module.gradient_checkpointing]
        for module in enabled:
            module.gradient_checkpointing = False
        if enabled and not self._told:
            self._told = True
            logger.warning(
                f"the model's activation checkpointing is switched off: {BLOCK}.recompute decides what is recomputed"
            )
