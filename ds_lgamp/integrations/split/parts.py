"""The parts of a model that belong to no block: modules, and parameters of the modules that contain the blocks."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from ds_lgamp.integrations.split.blocks import Blocks

Part = nn.Module | nn.Parameter


class Result(NamedTuple):
    """A floating-point tensor that a part returns; a part that is a parameter is its own only result."""

    path: str
    call: int = 0
    """Counts the calls of the part in one forward."""
    number: int = 0
    """Counts the tensors of one call."""


Returned = Mapping[tuple[str, int], Any]
"""What calls of parts ahead of the blocks return, with shapes for tensors, by the names of the parts and the numbers of
the calls of each in one forward."""


class Attribute(NamedTuple):
    """An attribute of a module in a block."""

    path: str
    """The name of the module in the block; "" for the block itself."""
    name: str


class Sides(NamedTuple):
    """The parts of a model, by their names in it."""

    ahead: Mapping[str, Part]
    """Those that are used ahead of the blocks."""
    behind: Mapping[str, Part]
    """All others."""
    is_shared: bool
    """Whether what follows the blocks computes with parameters of parts ahead of them, too."""

    @property
    def held_behind(self) -> Mapping[str, Part]:
        """The parts that the last layer holds."""
        return {**self.ahead, **self.behind} if self.is_shared else self.behind


def own_modules(model: nn.Module, blocks: Blocks, sides: Sides) -> list[nn.Module]:
    """Returns the modules that belong neither to a block nor to another part: those that contain the blocks, and those
    without parameters, whose code runs wherever the model's own forward does."""
    parts = [part for part in (*sides.ahead.values(), *sides.behind.values()) if isinstance(part, nn.Module)]
    others = {id(module) for part in (*parts, *blocks.named.values()) for module in part.modules()}
    return [module for module in model.modules() if id(module) not in others]


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


def parts_of(model: nn.Module, blocks: Blocks) -> Iterator[tuple[str, Part]]:
    """Yields what belongs to no block, in the order of the model: parameters of the modules that contain the blocks,
    and the largest modules with parameters or buffers that contain no block."""
    parents = [*blocks.chain, blocks.path]
    for parent in parents:
        prefix, module = f"{parent}." if parent else "", model.get_submodule(parent)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}{name}", parameter
        for name, child in [] if parent == blocks.path else list(module.named_children()):
            if f"{prefix}{name}" not in parents:
                yield from _called(f"{prefix}{name}", child)


def _called(path: str, module: nn.Module) -> Iterator[tuple[str, Part]]:
    """Yields the module, or, of one that only holds others and is never called, what it holds."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{path}.{name}", parameter
        for name, child in module.named_children():
            yield from _called(f"{path}.{name}", child)
    elif any(True for _ in chain(module.parameters(), module.buffers())):
        yield path, module


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
