"""Finds the blocks of a model: the list of modules that its forward calls one after another."""

from collections.abc import Collection
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
        """The blocks by their names in the list."""
        return {name: module for name, module in self.container._modules.items() if module is not None}

    @property
    def chain(self) -> list[str]:
        """Returns the names of the modules that contain the list, outermost first. The first one is the model, ""."""
        parts = self.path.split(".")
        return [".".join(parts[:depth]) for depth in range(len(parts))]


def find_blocks(model: nn.Module, planned: Collection[str] = ()) -> Blocks:
    """Returns the blocks of ``model``: a list with a ``planned`` name; without one, the list that holds most of the
    parameters of all lists. Looks for an nn.ModuleList first, then for an nn.ModuleDict, then for an nn.Sequential.

    Raises ConfigError if there is no such list.
    """
    if hasattr(model, "_orig_mod"):
        raise ConfigError(
            f"deepspeed.initialize got a model that torch.compile has wrapped, which hides its layers from a {BLOCK} "
            "block; pass the model itself, and call engine.compile(), or set torch_compile=True in TrainingArguments"
        )
    for kind in (nn.ModuleList, nn.ModuleDict, nn.Sequential):
        lists = _outermost(model, kind)
        for path, module in lists.items():
            if path.rpartition(".")[2] in planned and len(module):
                return Blocks(path, module)
        everything = sum(map(_elements, lists.values()))
        for path, module in lists.items():
            if 2 * _elements(module) > everything:
                return Blocks(path, module)
    raise ConfigError(
        f"{type(model).__name__} has no list of blocks that holds most of its parameters, so a {BLOCK} block cannot "
        "split it; write it as a PipelineModule or an nn.Sequential, or remove the block"
    )


def _outermost(model: nn.Module, kind: Any) -> dict[str, Any]:
    """Returns the lists of a ``kind`` that are in no other one, by name."""
    lists = {path: module for path, module in model.named_modules() if isinstance(module, kind) and path}
    return {path: module for path, module in lists.items() if not any(path.startswith(f"{p}.") for p in lists)}


def _elements(module: nn.Module) -> int:
    # zero.Init leaves parameters without elements, and their number in ds_numel.
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())
