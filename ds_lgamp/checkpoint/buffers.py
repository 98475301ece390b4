"""Names the copies of a buffer in a checkpoint: the first rank's, and every other one that differs from it."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ds_lgamp.checkpoint.units import BUFFERS


class Copy(NamedTuple):
    """A rank's copy of a buffer."""

    places: tuple[int, ...]
    """Pipeline, data-parallel and tensor-parallel rank."""
    digest: str
    """Of the bytes."""


def first_copies(ranks: Iterable[Mapping[str, Copy]]) -> dict[str, Copy]:
    """Returns the first copy of every buffer, by the name of the buffer.

    Args:
        ranks: the copies that each rank has. Data-parallel rank 0 comes first, there pipeline rank 0.
    """
    first: dict[str, Copy] = {}
    for copies in ranks:
        first = {**copies, **first}
    return first


def name_of_first(buffer: str) -> str:
    """Returns the name in a checkpoint of the first copy of ``buffer``."""
    return f"{BUFFERS}/0/{buffer}"


def name_of_own(buffer: str, places: tuple[int, ...]) -> str:
    """Returns the name in a checkpoint of the copy of ``buffer`` that the rank at ``places`` has, if it differs from
    the first."""
    pipeline_rank, data_rank, tensor_rank = places
    return f"{BUFFERS}/{data_rank}-{pipeline_rank}-{tensor_rank}/{buffer}"


def names_to_write(own: Mapping[str, Copy], first: Mapping[str, Copy]) -> dict[str, str]:
    """Returns the names in a checkpoint of the copies that a rank writes, by the name of the buffer. It writes its
    ``own`` copies where they are the ``first``, and where they differ from these, as running means do."""
    names = {}
    for buffer, copy in own.items():
        if copy.places == first[buffer].places:
            names[buffer] = name_of_first(buffer)
        elif copy.digest != first[buffer].digest:
            names[buffer] = name_of_own(buffer, copy.places)
    return names
