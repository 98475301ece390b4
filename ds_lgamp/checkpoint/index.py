"""The index of a tensor folder: its tensors and where their parts lie. It is JSON and is validated before use."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
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

from ds_lgamp.checkpoint.checksum import Checksum

Count = Annotated[int, Field(ge=0, lt=2**63)]


def _data_type(name: str) -> str:
    # Avoids getattr, because torch imports some attributes on demand.
    if not isinstance(vars(torch).get(name), torch.dtype):
        raise ValueError(f"'{name}' is not a data type of this torch")
    return name


DataType = Annotated[str, AfterValidator(_data_type)]
"""Name of a torch data type."""
Sizes = Annotated[list[Count], Field(max_length=64)]


class Part(NamedTuple):
    """A box of a tensor and the bytes that hold it."""

    offsets: Sizes
    sizes: Sizes
    file: Annotated[str, Field(pattern=r"^\w+\.distcp$")]
    position: Count
    length: Count
    checksum: Checksum


class Entry(BaseModel):
    """A tensor. Its parts cover every element exactly once."""

    model_config = ConfigDict(strict=True, extra="forbid")

    dtype: DataType
    shape: Sizes
    parts: list[Part]
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


class Index(BaseModel):
    """The content of index.json."""

    model_config = ConfigDict(strict=True, extra="forbid")

    metadata_checksum: Checksum
    """Checksum of DCP's own index, which only other programs read."""
    tensors: dict[str, Entry]

    def in_dcp(self) -> Metadata:
        """Converts the index for DCP's planners. ``storage_data`` holds a :class:`Part` for each item instead of DCP's
        own record."""
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
    parts: dict[str, list[Part]] = {name: [] for name in planned}
    for item, place, checksum in written:
        assert item.offset is not None, "the state has tensors only"
        box = list(item.offset), list(sizes[item.fqn, item.offset])
        parts[item.fqn].append(Part(*box, place.relative_path, place.offset, place.length, checksum))
    return Index(
        metadata_checksum=metadata_checksum,
        tensors={
            name: Entry(
                dtype=str(entry.properties.dtype).removeprefix("torch."), shape=list(entry.size), parts=parts[name]
            )
            for name, entry in planned.items()
        },
    )


def _overlap(parts: Sequence[Part]) -> Iterator[bool]:
    """Yields whether two parts share an element, for every pair that has a common row. ``parts`` must be sorted."""
    reach: list[Part] = []
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
