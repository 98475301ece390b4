"""Refuses Transformer Engine's delayed scaling, whose numbers depend on the order of work."""

from typing import Any

from torch import nn

from ds_lgamp.config import BLOCK, ConfigError

_PACKAGE = "transformer_engine"


def refuse_delayed_scaling(module: nn.Module) -> None:
    """Makes the parts of Transformer Engine in ``module`` raise ConfigError when they are called with delayed scaling.

    Delayed scaling takes its scales from a history of largest values. The end of every autocast moves the histories of
    all parts in the process on. A chunk that is computed again, after other micro-batches, takes other scales than the
    first time, and moves the histories on once more. Recipes without a history depend on the tensor alone. Only a
    forward knows its recipe.
    """
    for part in module.modules():
        if any(kind.__module__.partition(".")[0] == _PACKAGE for kind in type(part).__mro__):
            part.register_forward_pre_hook(_refuse_in_use)


def _refuse_in_use(part: nn.Module, inputs: Any) -> None:
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    if FP8GlobalStateManager.is_fp8_enabled() and isinstance(FP8GlobalStateManager.get_fp8_recipe(), DelayedScaling):
        raise ConfigError(
            f"fp8_recipe is DelayedScaling, whose scales depend on the order of work, which a {BLOCK} block changes; "
            "give Transformer Engine's autocast Float8CurrentScaling, MXFP8BlockScaling or Float8BlockScaling"
        )
