"""What each rank knows of a checkpoint's description. Joins the shares of all ranks."""

from collections.abc import Iterable
from typing import Any, NamedTuple


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


def merged(ranks: Iterable[Share]) -> Share:
    whole = Share({}, {}, set(), {})
    for rank in ranks:
        whole.parameters.update(rank.parameters)
        whole.scalars.update(rank.scalars)
        whole.extra_states.update(rank.extra_states)
        whole.of_parameters.update(rank.of_parameters)
    return whole


def enter(state: dict[str, Any], whole: Share) -> None:
    """Adds to ``state``, which describes the run on one rank, what all ranks have."""
    state["parameters"] = {name: whole.parameters[name] for name in sorted(whole.parameters, key=_layer_of)}
    state["optimizer"]["scalars"] = [whole.scalars.get(group, {}) for group in range(len(state["optimizer"]["groups"]))]
    if whole.of_parameters:
        state["optimizer"]["of_parameters"] = dict(sorted(whole.of_parameters.items()))
    state["layers"]["extra_states"] = sorted(whole.extra_states)


def _layer_of(name: str) -> int:
    """Returns the number of the layer that a parameter belongs to. Tied modules come first, as in the module."""
    first = name.split(".")[0]
    return int(first) if first.isdecimal() else -1
