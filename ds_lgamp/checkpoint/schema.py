"""The schemas of index.json and state.json. Their content is validated before use.

index.json lists the tensors of a tensor folder and where their parts lie. state.json has everything else.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ds_lgamp.checkpoint.files import Checksum, distrusted
from ds_lgamp.checkpoint.names import BUFFERS, OPTIMIZER, PARAMETERS, RANKS, parameter_name, parse
from ds_lgamp.checkpoint.ranges import FlatShard, blocks_of
from ds_lgamp.checkpoint.values import UnsupportedValue, decode, decode_dtype, name_of_dtype
from ds_lgamp.partition.shards import elements_of

Count = Annotated[int, Field(ge=0, lt=2**63)]


def _data_type(name: str) -> str:
    try:
        decode_dtype(name)
    except UnsupportedValue:
        raise ValueError(f"'{name}' is not a data type of this torch") from None
    return name


DataType = Annotated[str, AfterValidator(_data_type)]
"""Name of a torch data type."""
Sizes = Annotated[list[Count], Field(max_length=64)]


class StoredPart(NamedTuple):
    """A box of a tensor and the bytes that hold it."""

    offsets: Sizes
    sizes: Sizes
    file: Annotated[str, Field(pattern=r"^\w+\.distcp$")]
    position: Count
    length: Count
    checksum: Checksum


class Strict(BaseModel):
    """Checks types strictly, and has no other keys."""

    model_config = ConfigDict(strict=True, extra="forbid")


class Entry(Strict):
    """A tensor. Its parts cover every element exactly once."""

    dtype: DataType
    shape: Sizes
    parts: list[StoredPart]
    """Sorted by offsets."""

    @model_validator(mode="after")
    def _is_whole(self) -> "Entry":
        self.parts.sort(key=lambda part: part.offsets)
        for part in self.parts:
            axes = list(zip(part.offsets, part.sizes, self.shape))
            inside = all(size > 0 and offset + size <= end for offset, size, end in axes)
            if {len(part.offsets), len(part.sizes)} != {len(self.shape)} or not inside:
                raise ValueError("a part lies outside")
        elements = sum(prod(part.sizes) for part in self.parts)
        if elements != prod(self.shape) or not self.parts:
            raise ValueError(f"its parts have {elements} elements of {prod(self.shape)}")
        if any(_overlap(self.parts)):
            raise ValueError("its parts overlap")
        return self

    def in_dcp(self) -> TensorStorageMetadata:
        chunks = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in self.parts]
        return TensorStorageMetadata(TensorProperties(getattr(torch, self.dtype)), torch.Size(self.shape), chunks)


class Index(Strict):
    """The content of index.json."""

    metadata_checksum: Checksum
    """Checksum of DCP's own index, which only other programs read."""
    tensors: dict[str, Entry]

    def in_dcp(self) -> Metadata:
        """Converts the index for DCP's planners. ``storage_data`` holds a :class:`StoredPart` for each item instead of
        DCP's own record."""
        return Metadata(
            state_dict_metadata={name: entry.in_dcp() for name, entry in self.tensors.items()},
            storage_data={
                MetadataIndex(name, part.offsets): part for name, entry in self.tensors.items() for part in entry.parts
            },
            storage_meta=StorageMeta(),
        )


def make_index(
    metadata: Metadata, written: Iterable[tuple[MetadataIndex, _StorageInfo, str]], metadata_checksum: str
) -> Index:
    """Makes the index of the items that all ranks wrote.

    Args:
        metadata: DCP's global plan.
        written: name and offset, place, and checksum of every item.
        metadata_checksum: checksum of DCP's own index.
    """
    planned: Mapping[str, Any] = metadata.state_dict_metadata
    sizes = {(name, chunk.offsets): chunk.sizes for name, entry in planned.items() for chunk in entry.chunks}
    parts: dict[str, list[StoredPart]] = {name: [] for name in planned}
    for item, place, checksum in written:
        assert item.offset is not None, "the state has tensors only"
        box = list(item.offset), list(sizes[item.fqn, item.offset])
        parts[item.fqn].append(StoredPart(*box, place.relative_path, place.offset, place.length, checksum))
    return Index(
        metadata_checksum=metadata_checksum,
        tensors={
            name: Entry(dtype=name_of_dtype(entry.properties.dtype), shape=list(entry.size), parts=parts[name])
            for name, entry in planned.items()
        },
    )


def _overlap(parts: Sequence[StoredPart]) -> Iterator[bool]:
    """Yields whether two parts share an element, for every pair that has a common row. ``parts`` must be sorted."""
    reach: list[StoredPart] = []
    for part in parts:
        reach = [other for other in reach if not part.offsets or other.offsets[0] + other.sizes[0] > part.offsets[0]]
        for other in reach:
            axes = zip(part.offsets, part.sizes, other.offsets, other.sizes)
            yield all(max(first, second) < min(first + a, second + b) for first, a, second, b in axes)
        reach.append(part)


def first_complaint(error: ValidationError) -> str:
    """Describes pydantic's first error and where it is."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg'].removeprefix('Value error, ')}" if place else first["msg"]


Positive = Annotated[int, Field(ge=1, lt=2**31)]
Encoded = dict[str, Any]
"""A dictionary that values.py encoded."""


class _Open(Strict):
    """May also have keys of a later release."""

    model_config = ConfigDict(extra="allow")


class Layout(_Open):
    """The layout of the run that wrote the checkpoint."""

    pipeline_ranks: Positive
    data_ranks: Positive
    tensor_ranks: Positive
    zero_stage: Count
    schedule: str
    chunk_bounds: list[Count]
    placement: list[Count]
    data_type: DataType


class Layers(_Open):
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


class Parameter(_Open):
    shape: Sizes
    group: Count | None
    """Index of the optimizer's parameter group; None if the parameter does not train."""


class Optimizer(_Open):
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


class Scheduler(_Open):
    kind: str | None = Field(alias="class")
    state: Any
    """Encoded. It is mostly a dictionary, but the scheduler decides."""


class LossScaler(_Open):
    """Keys are the attribute names of DeepSpeed's dynamic loss scaler."""

    cur_scale: float
    cur_iter: Count
    last_overflow_iter: int
    cur_hysteresis: Count


class Counters(_Open):
    """Keys are the attribute names of the engine, but for ``pulled``."""

    global_steps: Count
    global_samples: Count
    skipped_steps: Count
    micro_steps: Count
    pulled: Count = Field(alias="_pulled_of_training_data")


PULLED = str(Counters.model_fields["pulled"].alias)
"""The name of the micro-batches taken of the engine's own data."""
COUNTERS = tuple(name for name, field in Counters.model_fields.items() if field.alias is None)
"""The counters that have the names of the engine's."""


class Epoch(_Open):
    micro_batches_per_epoch: Positive
    samples: Positive


class State(_Open):
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
        raise distrusted(path, first_complaint(error)) from None
    except UnsupportedValue as error:
        raise distrusted(path, f"it holds {error}") from None


def text_of(content: Mapping[str, Any]) -> FlatShard:
    """Returns the text that holds a rank's random states, extra states of layers and client state, which are
    encoded."""
    text = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
    return FlatShard(text.shape, 0, text)


def decode_text(folder: Path, name: str, text: torch.Tensor) -> dict[str, Any]:
    """Decodes a rank's random states, extra states of layers and client state from the tensor ``name`` of the
    checkpoint ``folder``.

    Raises CheckpointError if the tensor does not hold them.
    """
    try:
        content = decode(json.loads(text.numpy().tobytes()))
    except (RecursionError, UnsupportedValue, ValueError) as error:
        raise distrusted(folder, f"{name} holds {error}") from None
    if not isinstance(content, dict) or not all(isinstance(content.get(k), dict) for k in ("random", "client_state")):
        raise distrusted(folder, f"{name} holds neither random states nor a client state")
    if not isinstance(content.setdefault("extra_states", {}), dict):
        raise distrusted(folder, f"{name} holds no extra states of layers")
    return content


def check_tensors(path: Path, state: dict[str, Any], tensors: Mapping[str, TensorStorageMetadata]) -> None:
    """Raises CheckpointError if ``tensors`` do not match the list in ``state``, read from ``path``."""
    shapes = {name: info["shape"] for name, info in state["parameters"].items()}
    for name, shape in shapes.items():
        if prod(shape) and parameter_name(name) not in tensors:
            raise distrusted(path, f"it lists parameter {name}, but has no tensor of it")
    for key, entry in tensors.items():
        kind, name, of = parse(key)
        expected = shapes.get(name)
        if expected is not None and kind == OPTIMIZER:
            expected = blocks_of(expected, elements_of(of))
        if kind in (PARAMETERS, OPTIMIZER) and expected != list(entry.size):
            listed = f"lists {name} with shape {shapes[name]}" if name in shapes else f"does not list {name or key}"
            raise distrusted(path, f"it {listed}, but has {key} with shape {list(entry.size)}")
        is_text = entry.properties.dtype == torch.uint8 and len(entry.size) == 1
        if kind not in (PARAMETERS, OPTIMIZER, BUFFERS, RANKS) or (kind == RANKS and not is_text):
            raise distrusted(path, f"it has {key}, which belongs to no checkpoint")
