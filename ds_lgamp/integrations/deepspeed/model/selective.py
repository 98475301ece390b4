"""``"recompute": "selective"``: chunks are not recomputed, but layers that offer it recompute a part of themselves.

A layer offers it by an attribute ``recompute_selectively``, its own or that of a module inside. The engine sets it to
True; what the layer recomputes then, and from which random states, is up to the layer. Megatron-core's attention has
such a switch of its own.
"""

from collections.abc import Iterable
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_lgamp.config import BLOCK, ConfigError

SWITCH = "recompute_selectively"
MEGATRON_SWITCH = "checkpoint_core_attention"


def offers_selective(layer: Any) -> bool:
    """Whether ``layer``, or a module inside, can recompute a part of itself."""
    return isinstance(layer, nn.Module) and any(_switch_of(module) is not None for module in layer.modules())


def refuse_unless_offered(offers: Iterable[bool]) -> None:
    """Raises ConfigError if no layer of the model can recompute a part of itself."""
    if not any(offers):
        raise ConfigError(
            f"{BLOCK}.recompute is 'selective', but no layer of the model offers it: give layers an attribute {SWITCH} "
            "that makes them recompute a part of themselves, or use 'full' or 'none'"
        )


def switch_on(layers: nn.Module) -> None:
    """Lets layers recompute a part of themselves. A Megatron-core layer whose TransformerConfig names what to recompute
    stays as it is."""
    for module in layers.modules():
        name = _switch_of(module)
        if name == SWITCH or (name == MEGATRON_SWITCH and not _configured(module)):
            setattr(module, name, True)


def _switch_of(module: nn.Module) -> str | None:
    if hasattr(module, SWITCH):
        return SWITCH
    # Megatron-core reads the random states of a GPU when it recomputes.
    if hasattr(module, MEGATRON_SWITCH) and get_accelerator().device_name() != "cpu":
        return MEGATRON_SWITCH
    return None


def _configured(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "recompute_granularity", None) is not None
