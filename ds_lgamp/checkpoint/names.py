"""The names under which a checkpoint has what ranks hold, and the parts of its description that only some ranks know.

Of every buffer, a checkpoint has the first rank's copy, and each copy that differs from it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

PARAMETERS, OPTIMIZER, BUFFERS, RANKS = "parameters", "optimizer", "buffers", "ranks"
"""Prefixes of the names of tensors in a checkpoint."""
_FIRST = "0"
"""Marks the first copy of a buffer."""


class TensorName(NamedTuple):
    """The parts of a tensor's name in a checkpoint."""

    kind: str
    """The prefix."""
    name: str
    """The global name of a parameter or buffer; of what one rank alone has, its place."""
    of: str = ""
    """Of optimizer state, its key; of a buffer, whose copy it is."""

    @property
    def is_first_copy(self) -> bool:
        return self.kind == BUFFERS and self.of == _FIRST


def parse(tensor: str) -> TensorName:
    """Returns the parts of the name of a ``tensor`` in a checkpoint."""
    kind, _, rest = tensor.partition("/")
    if kind not in (OPTIMIZER, BUFFERS):
        return TensorName(kind, rest)
    of, _, name = rest.partition("/")
    return TensorName(kind, name, of)


def parameter_name(parameter: str) -> str:
    """Returns the name in a checkpoint of ``parameter``."""
    return f"{PARAMETERS}/{parameter}"


def state_name(key: str, parameter: str) -> str:
    """Returns the name in a checkpoint of the optimizer's state ``key`` of ``parameter``."""
    return f"{OPTIMIZER}/{key}/{parameter}"


def rank_name(pipeline_rank: int, data_rank: int, tensor_rank: int) -> str:
    """Returns the name in a checkpoint of what one rank alone has."""
    return f"{RANKS}/{pipeline_rank}-{data_rank}" + (f"-{tensor_rank}" if tensor_rank else "")


class Copy(NamedTuple):
    """A rank's copy of a buffer."""

    places: tuple[int, ...]
    """Pipeline, data-parallel and tensor-parallel rank."""
    digest: str
    """Of the bytes."""


def first_copies(ranks: Iterable[Mapping[str, Copy]]) -> dict[str, Copy]:
    """Returns the first copy of every buffer, by the name of the buffer. Of ``ranks``, data-parallel rank 0 comes
    first, there pipeline rank 0."""
    first: dict[str, Copy] = {}
    for copies in ranks:
        first = {**copies, **first}
    return first


def name_of_first(buffer: str) -> str:
    """Returns the name in a checkpoint of the first copy of ``buffer``."""
    return f"{BUFFERS}/{_FIRST}/{buffer}"


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


class Share(NamedTuple):
    """A rank's share of state.json."""

    parameters: dict[str, Any]
    """Descriptions of parameters by name."""
    scalars: dict[int, dict[str, Any]]
    """The optimizer's state beside tensors, by group."""
    extra_states: set[str]
    """The names of empty extra states."""
    of_parameters: dict[str, dict[str, Any]] = {}
    """The optimizer's state beside tensors of parameters that count their steps by themselves, by name."""


def merge(ranks: Iterable[Share]) -> Share:
    """Returns what all ranks have together."""
    whole = Share({}, {}, set(), {})
    for rank in ranks:
        whole.parameters.update(rank.parameters)
        whole.scalars.update(rank.scalars)
        whole.extra_states.update(rank.extra_states)
        whole.of_parameters.update(rank.of_parameters)
    return whole


def add_share(state: dict[str, Any], whole: Share) -> None:
    """Adds to ``state``, which describes the run on one rank, what all ranks have."""
    state["parameters"] = {name: whole.parameters[name] for name in sorted(whole.parameters, key=layer_of)}
    state["optimizer"]["scalars"] = [whole.scalars.get(group, {}) for group in range(len(state["optimizer"]["groups"]))]
    if whole.of_parameters:
        state["optimizer"]["of_parameters"] = dict(sorted(whole.of_parameters.items()))
    state["layers"]["extra_states"] = sorted(whole.extra_states)


def layer_of(name: str) -> int:
    """Returns the number of the layer that a parameter belongs to. Tied modules come first, as in the module."""
    first = name.split(".")[0]
    return int(first) if first.isdecimal() else -1
