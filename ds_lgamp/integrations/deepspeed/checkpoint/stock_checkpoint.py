"""Names and reads the checkpoint files of stock DeepSpeed's pipeline engine at ZeRO stages 0 and 1.

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
from collections.abc import Mapping
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from ds_lgamp.checkpoint.errors import CheckpointError


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
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "universal_checkpoint_info",
    }
)
"""The keys that DeepSpeed itself uses in a pipeline rank's file. All other keys are the user's client state."""
TIED = "tied_modules"
_LAYER_FILE = re.compile(r"layer_(\d+)(-model_00)?-model_states\.pt")


def refuse_whole_tensors(optimizer: str | None, options: Mapping[str, Any]) -> None:
    """Raises CheckpointError for LAMB and Muon, whose state DeepSpeed keeps in a form of its own.

    Args:
        optimizer: its type or class; None if that is unknown.
        options: those of its first parameter group.
    """
    name = (optimizer or "").lower()
    if name in ("lamb", "muon") or not {"use_muon", "max_coeff"}.isdisjoint(options):
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


def _reason(error: Exception) -> str:
    """Returns the object that torch refused to build; for other errors, their first line."""
    refused = re.search(r"GLOBAL ([\w.]+)", str(error))
    if refused is not None:
        return f"it asks for {refused[1]}"
    return str(error).partition("\n")[0].strip() or type(error).__name__
