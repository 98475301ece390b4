"""Finds the layer or the tied module that each layer file of stock DeepSpeed holds."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from ds_lgamp.checkpoint.errors import CheckpointError
from ds_lgamp.integrations.deepspeed.checkpoint.stock_checkpoint import TIED, layer_file


class StockLayers(NamedTuple):
    """The content of the layer files, under names that are the same in every layout."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    extra_states: list[str]
    """The names of empty entries. Loading fails if a state lacks them."""
    bounds: list[int]
    """The first layer of each pipeline rank, as far as parameters show it, then the number of layers."""
    tied: dict[str, list[int]]
    """The layers that use each tied module, by its key. They include one layer of every pipeline rank that has the
    module. A key is absent if the files do not show these layers."""


def name_layers(
    folder: Path, contents: dict[int, dict[str, Tensor]], masters: list[dict[str, Tensor]], buffers: set[str]
) -> StockLayers:
    """Names the tensors of the layer files.

    Args:
        folder: the checkpoint's folder, for error messages.
        contents: the content of each layer's file, by layer.
        masters: the flat master weights of each pipeline rank by name.
        buffers: the names of all buffers.

    Raises CheckpointError if the files and the master weights do not belong to one model, or if a layer has extra
    state.
    """
    names = set().union(*masters) | buffers
    tied: dict[str, list[int]] = {key: [] for key in tied_keys(names)}
    parameters: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}
    extra_states: dict[str, None] = {}
    for layer, content in contents.items():
        prefix = str(layer)
        if not any(f"{layer}.{inner}" in names for inner in content):
            key = next((key for key in tied if _holds(content, key, masters)), None)
            if key is not None:
                tied[key].append(layer)
                prefix = f"{TIED}.{key}"
        for inner, tensor in content.items():
            name = f"{prefix}.{inner}"
            if tensor is None:
                extra_states[name] = None
                continue
            if not isinstance(tensor, Tensor) or inner.endswith(_EXTRA_STATE_KEY_SUFFIX):
                raise CheckpointError(
                    f"{folder / layer_file(layer)} has {inner}, which is neither parameter nor buffer and which a "
                    "block does not keep; save it from layers without extra state"
                )
            (kept if name in buffers else parameters).setdefault(name, tensor)
    _check_complete(folder, parameters, masters)
    bounds = _bounds(contents, masters)
    owners = {key: [rank for rank, held in enumerate(masters) if key in tied_keys(held)] for key in tied}
    return StockLayers(parameters, kept, list(extra_states), bounds, _users(tied, owners, bounds, set(contents)))


def tied_keys(names: set[str] | dict[str, Tensor]) -> list[str]:
    """Returns the keys of the tied modules among ``names``, sorted."""
    return sorted({name.split(".")[1] for name in names if name.startswith(f"{TIED}.")})


def _holds(content: dict[str, Tensor], key: str, masters: list[dict[str, Tensor]]) -> bool:
    """Returns whether ``content`` has the weights of the tied module ``key`` on one of the pipeline ranks."""
    prefix = f"{TIED}.{key}."
    for held in masters:
        weights = {name.removeprefix(prefix): tensor for name, tensor in held.items() if name.startswith(prefix)}
        if weights and all(
            inner in content and torch.equal(content[inner].flatten(), tensor.to(content[inner].dtype))
            for inner, tensor in weights.items()
        ):
            return True
    return False


def _check_complete(folder: Path, parameters: dict[str, Tensor], masters: list[dict[str, Tensor]]) -> None:
    for held in masters:
        for name, tensor in held.items():
            if name not in parameters:
                raise CheckpointError(
                    f"{folder} has optimizer state of {name}, which none of its layer files holds; copy the checkpoint "
                    "again, and if it is a tied module's, save it with a layer that has no forward_fn"
                )
            if parameters[name].numel() != tensor.numel():
                raise CheckpointError(
                    f"{folder} has {tensor.numel()} master weights of {name}, which has {parameters[name].numel()} "
                    "elements; copy the checkpoint again, with the files of all ranks"
                )


def _bounds(contents: dict[int, dict[str, Tensor]], masters: list[dict[str, Tensor]]) -> list[int]:
    bounds = [max(contents, default=-1) + 1]
    for held in reversed(masters[1:]):
        bounds.insert(0, min(_layers(held), default=bounds[0]))
    return [0, *bounds]


def _layers(names: dict[str, Tensor]) -> Iterator[int]:
    return (int(name.partition(".")[0]) for name in names if not name.startswith(f"{TIED}."))


def _users(
    tied: dict[str, list[int]], owners: dict[str, list[int]], bounds: list[int], with_file: set[int]
) -> dict[str, list[int]]:
    """Returns the layers that use each tied module, by its key; without keys for which they stay unknown.

    A layer that uses a tied module by a function of its own has no file. So if a rank has the module, but no file of
    it, the rank's only layer without a file is the user. On the last rank this may be a layer after the last file;
    then the last entry of ``bounds`` grows by 1.
    """
    last = len(bounds) - 2
    users = {}
    for key, layers in tied.items():
        found = []
        for rank in owners[key]:
            own = range(bounds[rank], bounds[rank + 1])
            seen = [layer for layer in layers if layer in own]
            missing = [layer for layer in own if layer not in with_file]
            if not seen and not missing and rank == last:
                missing = [bounds[-1]]
            found += seen[:1] or (missing if len(missing) == 1 else [])
        if len(found) == len(owners[key]):
            users[key] = sorted({*layers, *found})
    if any(bounds[-1] in layers for layers in users.values()):
        bounds[-1] += 1
    return users
