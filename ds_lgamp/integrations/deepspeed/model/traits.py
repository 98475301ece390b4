"""What layers have beside tensors, and users change before ``deepspeed.initialize``: a rate of dropout, a hook."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Traits(NamedTuple):
    """Those of a layer or a part of it."""

    values: dict[str, bool | float]
    """Attributes that a part of another rank may have just so. Whole numbers may number a rank or its device."""
    hooks: int
    """How many hooks it has, with a ``forward`` of its own and hooks of its parameters."""


def traits_of(layer: nn.Module, prefix: str) -> Iterator[tuple[str, Traits]]:
    """Yields the traits of ``layer`` and its parts, by name."""
    for name, part in layer.named_modules(prefix=prefix):
        yield name, _traits(part)


def adopt_traits(layers: Mapping[str, nn.Module], traits: Mapping[str, Traits]) -> str | None:
    """Gives layers, which were built anew, the ``traits`` of those whose places they take.

    Returns a complaint if one of these had other hooks, which cannot move; else None.
    """
    for prefix, layer in layers.items():
        for name, part in layer.named_modules(prefix=prefix):
            values, hooks = traits.get(name) or _traits(part)
            if hooks != _traits(part).hooks:
                return (
                    f"layer {name} has hooks or a forward that its specification does not build, and it moves to "
                    "another pipeline rank; add them after deepspeed.initialize, or in the layer's class"
                )
            for attribute, value in values.items():
                setattr(part, attribute, value)
    return None


def _traits(part: nn.Module) -> Traits:
    own = vars(part)
    hooks = sum(len(own.get(kind) or ()) for kind in _HOOKS) + ("forward" in own)
    hooks += sum(
        len(parameter._backward_hooks or ()) for parameter in part._parameters.values() if parameter is not None
    )
    values = {name: value for name, value in own.items() if name[0] != "_" and isinstance(value, (bool, float))}
    return Traits(values, hooks)
