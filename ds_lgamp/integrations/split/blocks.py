"""Finds the blocks of a model: the list of modules that its forward calls one after another."""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from torch import nn

from ds_lgamp.config import BLOCK, ConfigError


class Blocks(NamedTuple):
    """The blocks, where they are in the model."""

    path: str
    """The name of the list in the model, such as ``model.layers``."""
    container: nn.Module
    """The list."""

    @property
    def named(self) -> dict[str, nn.Module]:
        """The blocks by their names in the list, such as ``0``, or ``0.1`` if it is one of lists."""
        return dict(_modules_in(self.container))

    @property
    def kinds(self) -> list[nn.Module]:
        """The first block of every kind. Those of one kind have modules of the same classes under the same names."""
        kinds: dict[Any, nn.Module] = {}
        for block in self.named.values():
            kinds.setdefault(tuple((path, type(module)) for path, module in block.named_modules()), block)
        return [*kinds.values()]

    @property
    def chain(self) -> list[str]:
        """Returns the names of the modules that contain the list, outermost first. The first one is the model, ""."""
        parts = self.path.split(".")
        return [".".join(parts[:depth]) for depth in range(len(parts))]


def find_blocks(model: nn.Module, chosen: str | None, planned: Collection[str] = ()) -> Blocks:
    """Returns the blocks of ``model``: the list with the ``chosen`` name; by default one with a ``planned`` name, or
    else that with most parameters. A list is an nn.ModuleList that is in no other one, or an nn.ModuleDict or
    nn.Sequential of modules of one class.

    Raises ConfigError if there is no list, or not the chosen one.
    """
    if hasattr(model, "_orig_mod"):
        raise ConfigError(
            f"deepspeed.initialize got a model that torch.compile has wrapped, which hides its layers from a {BLOCK} "
            "block; pass the model itself, and call engine.compile(), or set torch_compile=True in TrainingArguments"
        )
    lists = [each for each in _lists(model) if each.named]
    if not any(_elements(each.container) for each in lists):
        raise ConfigError(
            f"{type(model).__name__} has no list of blocks, so a {BLOCK} block cannot split it; write it as a "
            "PipelineModule or an nn.Sequential, or remove the block"
        )
    if chosen is not None:
        named = {each.path: each for each in lists}
        if chosen not in named:
            raise ConfigError(
                f"{BLOCK}.blocks is '{chosen}', but the lists of {type(model).__name__} are {', '.join(named)}; name "
                "the one whose modules the forward calls one after another"
            )
        return named[chosen]
    for each in lists:
        if each.path.rpartition(".")[2] in planned:
            return each
    return max(lists, key=lambda each: _elements(each.container))


def _modules_in(container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules in ``container`` by their names there, and those in lists in it, which nobody can call."""
    for name, module in container._modules.items():
        if module is None:
            continue
        if type(module) in (nn.ModuleList, nn.ModuleDict):
            yield from ((f"{name}.{inner}", each) for inner, each in _modules_in(module))
        else:
            yield name, module


def _lists(model: nn.Module) -> Iterator[Blocks]:
    seen: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in seen):
            seen.append(path)
            yield Blocks(path, module)
        elif isinstance(module, nn.ModuleDict | nn.Sequential) and path and _is_alike(module):
            yield Blocks(path, module)


def _is_alike(module: nn.Module) -> bool:
    """Whether a module contains several others, all of one class."""
    children = list(module.children())
    return len(children) > 1 and len({type(child) for child in children}) == 1


def _elements(module: nn.Module) -> int:
    # zero.Init leaves parameters without elements, and their number in ds_numel.
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())
