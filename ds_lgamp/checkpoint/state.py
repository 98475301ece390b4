"""The schema of state.json. The content is validated before use."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ds_lgamp.checkpoint.checksum import Checksum
from ds_lgamp.checkpoint.errors import CheckpointError
from ds_lgamp.checkpoint.index import Count, DataType, Sizes, first_complaint
from ds_lgamp.checkpoint.units import BUFFERS, OPTIMIZER, PARAMETERS, RANKS
from ds_lgamp.checkpoint.values import UnsupportedValue, decode

Positive = Annotated[int, Field(ge=1, lt=2**31)]
Encoded = dict[str, Any]
"""A dictionary that values.py encoded."""


class _Strict(BaseModel):
    """Checks types strictly and keeps unknown keys."""

    model_config = ConfigDict(strict=True, extra="allow")


class Layout(_Strict):
    """The layout of the run that wrote the checkpoint."""

    pipeline_ranks: Positive
    data_ranks: Positive
    tensor_ranks: Positive
    zero_stage: Count
    schedule: str
    chunk_bounds: list[Count]
    placement: list[Count]
    data_type: DataType


class Layers(_Strict):
    """The facts on which stock DeepSpeed's pipeline layout depends."""

    types: list[str] | None
    """None if only a run could know them."""
    tied: dict[str, list[Count]]
    partition_method: str | None
    extra_states: list[str]
    names_of_model: bool = False
    """Whether names inside layers are those that the whole model has, as in models of transformers."""
    other_names: dict[str, str] = {}
    """More names that the whole model has for a parameter, each with the one inside its layer."""


class Parameter(_Strict):
    shape: Sizes
    group: Count | None
    """Index of the optimizer's parameter group; None if the parameter does not train."""


class Optimizer(_Strict):
    kind: str | None = Field(alias="class")
    groups: list[Encoded]
    scalars: list[Encoded]
    """By group, the state without tensors of the parameter's shape."""
    of_parameters: dict[str, Encoded] = {}
    """The same of parameters that do not always step with their group, because they were frozen for a time, by name."""

    @model_validator(mode="after")
    def _have_both(self) -> "Optimizer":
        if len(self.groups) != len(self.scalars):
            raise ValueError(f"it has {len(self.groups)} parameter groups but scalars of {len(self.scalars)}")
        return self


class Scheduler(_Strict):
    kind: str | None = Field(alias="class")
    state: Any
    """Encoded. It is mostly a dictionary, but the scheduler decides."""


class LossScaler(_Strict):
    """Keys are the attribute names of DeepSpeed's dynamic loss scaler."""

    cur_scale: float
    cur_iter: Count
    last_overflow_iter: int
    cur_hysteresis: Count


class Counters(_Strict):
    """Keys are the attribute names of the engine."""

    global_steps: Count
    global_samples: Count
    skipped_steps: Count
    micro_steps: Count
    pulled: Count = Field(alias="_pulled_of_training_data")


class Epoch(_Strict):
    micro_batches_per_epoch: Positive
    samples: Positive


class State(_Strict):
    """Format 3."""

    versions: dict[str, str]
    layout: Layout
    layers: Layers
    parameters: dict[str, Parameter]
    optimizer: Optimizer | None
    """None for a checkpoint of weights only."""
    lr_scheduler: Scheduler | None
    loss_scaler: LossScaler | None
    counters: Counters
    micro_offset: Count
    late_overflow: bool = False
    """Whether the last step was skipped and no counter says so yet."""
    data: Epoch | None
    tensors: Annotated[str, Field(pattern=r"^tensors-\w+$")]
    """Name of the tensor folder."""
    index_checksum: Checksum


def check_state(path: Path, state: Any) -> None:
    """Raises CheckpointError if ``state``, read from ``path``, is not what save_checkpoint writes."""
    try:
        State.model_validate(state)
        decode(state)
    except ValidationError as error:
        raise _distrusted(path, first_complaint(error)) from None
    except UnsupportedValue as error:
        raise _distrusted(path, f"it holds {error}") from None


def decode_text(folder: Path, name: str, text: torch.Tensor) -> dict[str, Any]:
    """Decodes a rank's random states, extra states of layers and client state from the tensor ``name`` of the
    checkpoint ``folder``.

    Raises CheckpointError if the tensor does not hold them.
    """
    try:
        content = decode(json.loads(text.numpy().tobytes()))
    except (RecursionError, UnsupportedValue, ValueError) as error:
        raise _distrusted(folder, f"{name} holds {error}") from None
    if not isinstance(content, dict) or not all(isinstance(content.get(k), dict) for k in ("random", "client_state")):
        raise _distrusted(folder, f"{name} holds neither random states nor a client state")
    if not isinstance(content.setdefault("extra_states", {}), dict):
        raise _distrusted(folder, f"{name} holds no extra states of layers")
    return content


def check_tensors(path: Path, state: dict[str, Any], tensors: Mapping[str, TensorStorageMetadata]) -> None:
    """Raises CheckpointError if ``tensors`` do not match the list in ``state``, read from ``path``."""
    shapes = {name: info["shape"] for name, info in state["parameters"].items()}
    for name, shape in shapes.items():
        if prod(shape) and f"{PARAMETERS}/{name}" not in tensors:
            raise _distrusted(path, f"it lists parameter {name}, but has no tensor of it")
    for key, entry in tensors.items():
        kind, _, rest = key.partition("/")
        name = rest.partition("/")[2] if kind == OPTIMIZER else rest
        if kind in (PARAMETERS, OPTIMIZER) and shapes.get(name) != list(entry.size):
            listed = f"lists {name} with shape {shapes[name]}" if name in shapes else f"does not list {name or key}"
            raise _distrusted(path, f"it {listed}, but has {key} with shape {list(entry.size)}")
        is_text = entry.properties.dtype == torch.uint8 and len(entry.size) == 1
        if kind not in (PARAMETERS, OPTIMIZER, BUFFERS, RANKS) or (kind == RANKS and not is_text):
            raise _distrusted(path, f"it has {key}, which belongs to no checkpoint")


def _distrusted(path: Path, complaint: str) -> CheckpointError:
    return CheckpointError(f"{path} is not what ds_lgamp writes ({complaint}); do not trust this checkpoint")
