"""The parts of a model that belong to no block: modules, and parameters of the modules that contain the blocks."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

Part = nn.Module | nn.Parameter


class Result(NamedTuple):
    """A floating-point tensor that a part returns; a part that is a parameter is its own only result."""

    path: str
    call: int = 0
    """Counts the calls of the part in one forward."""
    number: int = 0
    """Counts the tensors of one call."""


def model_of(model: Any) -> Any:
    """Returns the model inside ``model``, which peft may have wrapped."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def part_of(model: nn.Module, path: str) -> Part:
    """Returns the part with this name."""
    registry, name = place_of(model, path)
    return registry[name]


def place_of(model: nn.Module, path: str) -> tuple[dict[str, Any], str]:
    """Returns in which of a module's dictionaries the part lies, and under which name."""
    parent, _, name = path.rpartition(".")
    module = model.get_submodule(parent)
    return (module._parameters if name in module._parameters else module._modules), name


def parameters_of(parts: Iterable[Part]) -> Iterator[nn.Parameter]:
    """Yields the parameters of all parts. One that is in several parts comes several times."""
    for part in parts:
        yield from [part] if isinstance(part, nn.Parameter) else part.parameters()


@contextmanager
def restored_modes(module: nn.Module) -> Iterator[None]:
    """Restores after the block whether ``module`` and the modules in it train or evaluate."""
    before = [(each, each.training) for each in module.modules()]
    try:
        yield
    finally:
        for each, mode in before:
            each.training = mode
