"""``"recompute": "selective"``: chunks are not recomputed, but layers that offer it recompute a part of themselves.

A layer offers it by an attribute ``recompute_selectively`` of its own or of a module inside it. The engine sets the
attribute to True. The layer itself chooses the part that it recomputes and the random states for it. Megatron-core's
attention has its own switch for this.
"""

from collections.abc import Iterable
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_lgamp.config import BLOCK, ConfigError

SWITCH = "recompute_selectively"
MEGATRON_SWITCH = "checkpoint_core_attention"


def offers_selective(layer: Any) -> bool:
    """Returns whether ``layer``, or a module inside it, can recompute a part of itself."""
    return isinstance(layer, nn.Module) and any(_switch_of(module) is not None for module in layer.modules())


def refuse_unless_offered(offers: Iterable[bool]) -> None:
    """Raises ConfigError if no layer of the model can recompute a part of itself."""
    if not any(offers):
        raise ConfigError(
            f"{BLOCK}.recompute is 'selective', but no layer of the model offers it: give layers an attribute {SWITCH} "
            "that makes them recompute a part of themselves, or use 'full' or 'none'"
        )


def switch_on(layers: nn.Module) -> None:
    """Makes layers recompute a part of themselves. A Megatron-core layer stays as it is if its TransformerConfig sets
    ``recompute_granularity``."""
    for module in layers.modules():
        name = _switch_of(module)
        if name == SWITCH or (name == MEGATRON_SWITCH and not _configured(module)):
            setattr(module, name, True)


def _switch_of(module: nn.Module) -> str | None:
    if hasattr(module, SWITCH):
        return SWITCH
    # Megatron-core cannot recompute on the CPU, because it reads the random states of a GPU then.
    if hasattr(module, MEGATRON_SWITCH) and get_accelerator().device_name() != "cpu":
        return MEGATRON_SWITCH
    return None


def _configured(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "recompute_granularity", None) is not None
