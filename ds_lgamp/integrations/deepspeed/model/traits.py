"""What layers have beside tensors that users may change before ``deepspeed.initialize``: a rate of dropout, a hook."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Traits(NamedTuple):
    """Those of a layer or a part of it."""

    values: dict[str, bool | float]
    """Attributes of torch's own modules, such as a rate of dropout. Those of other classes may belong to a rank."""
    hooks: int
    """How many hooks it has, with a ``forward`` of its own and hooks of its parameters."""


def traits_of(layer: nn.Module, prefix: str) -> Iterator[tuple[str, Traits]]:
    """Yields the traits of ``layer`` and its parts, by name."""
    for name, part in layer.named_modules(prefix=prefix):
        yield name, _traits(part)


def adopt_traits(layers: Mapping[str, nn.Module], traits: Mapping[str, Traits]) -> str | None:
    """Gives layers, which were built anew, the ``traits`` of those whose places they take.

    Returns a complaint if one of the latter had other hooks, which cannot move; else None.
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
    is_torchs = type(part).__module__.startswith("torch.nn.")
    values = {name: own[name] for name in own if is_torchs and name[0] != "_" and isinstance(own[name], (bool, float))}
    return Traits(values, hooks)
