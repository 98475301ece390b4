"""The checkpoint files of stock DeepSpeed's pipeline engine at ZeRO stages 0 and 1: their names, their content, and the
layer or tied module that each holds.

TAG/layer_03-model_states.pt                             parameters and buffers of layer 3, in the data type in which
                                                         the model computes
TAG/mp_rank_01_model_states.pt                           counters, scheduler and client state, alike for all pipeline
                                                         ranks; at stage 0 also the optimizer of pipeline rank 1
TAG/[bf16_]zero_pp_rank_2_mp_rank_01_optim_states.pt     at stage 1: the master weights and optimizer state on
                                                         data-parallel rank 2 of pipeline rank 1, one flat tensor per
                                                         parameter group
"""

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.integrations.deepspeed.model.module import PlacedModule, built_layers, prefix_of


def _stage_named(kind: Any, name: Any) -> ZeroStageEnum:
    """Takes the place of getattr in a file, by which Python 3.11.0 to 3.11.3 write the members of an enumeration."""
    if kind is not ZeroStageEnum:
        raise UnpicklingError("it asks for getattr")
    return ZeroStageEnum[name]


CLASSES = [
    *(fragment_address, LossScaler, DynamicLossScaler, ZeroStageEnum, (_stage_named, "builtins.getattr")),
    *(Namespace, SimpleNamespace, frozenset, PosixPath, PurePosixPath, PureWindowsPath),
]
"""The classes that stock DeepSpeed's files contain beside tensors, numbers, strings and containers, and those that
scripts often put into their client state. Building such an object runs no code that the file chooses."""
KEYS = frozenset(
    (
        "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments "
        "lr_scheduler data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size "
        "checkpoint_parallel_dimensions ds_config ds_version universal_checkpoint_info"
    ).split()
)
"""The keys that DeepSpeed itself uses in a pipeline rank's file. All other keys are the user's client state."""
TIED = "tied_modules"
_LAYER_FILE = re.compile(r"layer_(\d+)(-model_00)?-model_states\.pt")


def refuse_whole_tensors(optimizer: str | None, options: Mapping[str, Any]) -> None:
    """Raises CheckpointError for LAMB and Muon, whose state DeepSpeed keeps in a form of its own, and for state of 8
    bits, whose blocks it cuts elsewhere.

    Args:
        optimizer: its type or class; None if that is unknown.
        options: those of its first parameter group.
    """
    name = (optimizer or "").lower()
    if name in ("lamb", "muon") or name.endswith("8bit") or not {"use_muon", "max_coeff"}.isdisjoint(options):
        raise CheckpointError(
            f"the checkpoint is of a run with {optimizer or 'LAMB or Muon'}, whose state stock DeepSpeed keeps in "
            "another form; go on with what wrote it"
        )


def rank_file(pipeline_rank: int) -> str:
    return f"mp_rank_{pipeline_rank:02d}_model_states.pt"


def layer_file(layer: int) -> str:
    return f"layer_{layer:02d}-model_states.pt"


def shard_file(pipeline_rank: int, data_rank: int, bf16: bool) -> str:
    prefix = "bf16_" if bf16 else ""
    return f"{prefix}zero_pp_rank_{data_rank}_mp_rank_{pipeline_rank:02d}_optim_states.pt"


def layer_files(folder: Path) -> dict[int, Path]:
    """Returns the layer files by layer number, in ascending order. A layer without a file is absent. File names include
    ``-model_00`` if the topology has an axis ``model``, even of one rank."""
    found = ((_LAYER_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in found if match is not None))


def has_layer_files(folder: Path) -> bool:
    """Whether stock DeepSpeed, or a script that writes as it does, saved layers in ``folder``."""
    return any(folder.glob("layer_*-model_states.pt"))


def load_file(path: Path) -> dict[str, Any]:
    """Returns the content of ``path`` on the CPU. Runs no code from the file.

    Raises CheckpointError if the file is missing, holds no dictionary or needs other classes than ``CLASSES``.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; copy the checkpoint again, with the files of all ranks")
    try:
        with torch.serialization.safe_globals(CLASSES):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read without running code from it ({_reason(error)}); if the run is yours, save it "
            "again with numbers, strings, tensors, lists, dictionaries and namespaces as client_state"
        ) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, no dictionary; name a checkpoint of DeepSpeed")
    return content


def read_client_state(folder: Path) -> dict[str, Any]:
    """Returns what the script that saved ``folder`` gave as client state."""
    return {key: value for key, value in load_file(folder / rank_file(0)).items() if key not in KEYS}


def read_layers(folder: Path, module: PlacedModule) -> dict[str, Tensor]:
    """Returns the tensors of the layers that are on this rank of ``module``, by global name. A tied module takes those
    of the first layer that uses it, as when DeepSpeed loads.

    Raises CheckpointError if the files were written with tensor parallelism, if the module has it, or if a layer has
    extra state.
    """
    refuse_tensor_ranks(folder)
    if module._grid.get_slice_parallel_world_size() > 1:
        raise CheckpointError(f"{folder} holds whole layers, which tensor-parallel ranks cannot load; load it without")
    files, own = layer_files(folder), built_layers(module)
    found: dict[str, Tensor] = {}
    for layer, spec in enumerate(module._layer_specs):
        prefix = prefix_of(layer, spec)
        if prefix in own and layer in files:
            for inner, tensor in load_file(files[layer]).items():
                # An empty extra state.
                if tensor is not None:
                    refuse_extra_state(files[layer], inner, tensor)
                    found.setdefault(f"{prefix}.{inner}", tensor)
    return found


def refuse_extra_state(path: Path, inner: str, value: Any) -> None:
    """Raises CheckpointError if ``value`` in the layer file ``path`` is neither parameter nor buffer."""
    if not isinstance(value, Tensor) or inner.endswith(_EXTRA_STATE_KEY_SUFFIX):
        raise CheckpointError(
            f"{path} has {inner}, which is neither parameter nor buffer and which a block does not keep; save it from "
            "layers without extra state"
        )


def refuse_tensor_ranks(folder: Path, tensor_ranks: int = 1) -> None:
    """Raises CheckpointError if a file, or the names of layer files, say that ``folder`` is of several tensor-parallel
    ranks."""
    if tensor_ranks != 1 or any(folder.glob("layer_*-model_01-*")):
        raise CheckpointError(f"{folder} was written with tensor parallelism; save it without tensor parallelism")


def _reason(error: Exception) -> str:
    """Returns the object that torch refused to build; for other errors, their first line."""
    refused = re.search(r"GLOBAL ([\w.]+)", str(error))
    if refused is not None:
        return f"it asks for {refused[1]}"
    return str(error).partition("\n")[0].strip() or type(error).__name__


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
    of_buffers: dict[str, Tensor] = {}
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
            refuse_extra_state(folder / layer_file(layer), inner, tensor)
            (of_buffers if name in buffers else parameters).setdefault(name, tensor)
    _check_complete(folder, parameters, masters)
    bounds = _bounds(contents, masters)
    owners = {key: [rank for rank, held in enumerate(masters) if key in tied_keys(held)] for key in tied}
    return StockLayers(parameters, of_buffers, list(extra_states), bounds, _users(tied, owners, bounds, set(contents)))


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
