"""Finds the blocks of a model: the list of modules that its forward calls one after another."""

from typing import Any, NamedTuple

from torch import nn

from ds_lgamp.config import BLOCK, ConfigError


class Blocks(NamedTuple):
    """The blocks, where they are in the model."""

    path: str
    """The name of the list in the model, such as ``model.layers``."""
    modules: nn.ModuleList

    @property
    def chain(self) -> list[str]:
        """Returns the names of the modules that contain the list, outermost first. The first one is the model, ""."""
        parts = self.path.split(".")
        return [".".join(parts[:depth]) for depth in range(len(parts))]


def find_blocks(model: nn.Module) -> Blocks:
    """Returns the blocks that the configuration's pipeline plan names; without a plan, the list of modules that holds
    most of the parameters.

    Raises ConfigError if there is no such list.
    """
    planned = _planned_names(model)
    lists = {path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and path}
    outermost = {path: module for path, module in lists.items() if not any(path.startswith(f"{p}.") for p in lists)}
    for path, module in outermost.items():
        if path.rpartition(".")[2] in planned and len(module):
            return Blocks(path, module)
    everything = _elements(model)
    for path, module in outermost.items():
        if 2 * _elements(module) > everything:
            return Blocks(path, module)
    raise ConfigError(
        f"{type(model).__name__} has no list of blocks that holds most of its parameters, so a {BLOCK} block cannot "
        "split it; write it as a PipelineModule, or remove the block"
    )


def _planned_names(model: Any) -> set[str]:
    """Returns the names in the pipeline plan of the model's configuration."""
    config = getattr(model, "config", None)
    return set(getattr(config, "base_model_pp_plan", None) or ())


def _elements(module: nn.Module) -> int:
    # zero.Init leaves parameters without elements, and their number in ds_numel.
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())
