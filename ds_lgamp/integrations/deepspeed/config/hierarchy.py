"""Hierarchical shards, as ds_config.json asks for them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.model.module import over_data
from ds_lgamp.integrations.shard_keys import HPZ, MICS, active
from ds_lgamp.partition.agreement import raise_everywhere
from ds_lgamp.runtime.node import node_name
from ds_lgamp.schedule.hierarchy import Hierarchy
from ds_lgamp.watch.this_rank import this_rank


def hierarchy_of(config: Mapping[str, Any], zero_stage: int, module: PipelineModule) -> Hierarchy | None:
    """Returns the hierarchical shards that ``config`` asks for; None if nothing asks for them, or if the group is all
    ranks.

    Below stage 3 the keys mean nothing, as in DeepSpeed. Collective over all ranks; raises ConfigError on all of them
    if the group does not fit the data-parallel ranks or their nodes.
    """
    asked = active(config)
    if zero_stage < 3 or not asked:
        return None
    if len(asked) > 1:
        raise ConfigError(
            f"zero_optimization.{HPZ} is {asked[HPZ]} and zero_optimization.{MICS} is {asked[MICS]}, but both say "
            "how shards form groups; keep one of them"
        )
    ((name, size),) = asked.items()
    ranks = module.topology().get_dim("data")
    if ranks % size:
        fitting = ", ".join(str(number) for number in range(1, ranks + 1) if ranks % number == 0)
        raise ConfigError(
            f"zero_optimization.{name} is {size}, which does not divide {ranks} data-parallel ranks; use one of "
            f"{fitting}"
        )
    if size == ranks:
        return None
    raise_everywhere(next(_complaints(name, size, over_data(module, _place())), None), ConfigError)
    return Hierarchy(size, replicated=name == MICS)


def _place() -> str:
    """Returns where this rank is, in words: its island if there is a cluster file, else its node."""
    assignment = this_rank.assignment
    return f"node {node_name()}" if assignment is None else f"island {assignment.slots[dist.get_rank()].island}"


def _complaints(name: str, size: int, places: Sequence[str]) -> Iterator[str]:
    """Yields a sentence for every group of ``size`` neighbours that are not all in one place."""
    for first in range(0, len(places), size):
        other = next((rank for rank in range(first, first + size) if places[rank] != places[first]), None)
        if other is not None:
            yield (
                f"zero_optimization.{name} is {size}, but data-parallel ranks {first} and {other} of one group are in "
                f"two places, {places[first]} and {places[other]}; use a divisor of the "
                f"{places.count(places[first])} ranks of {places[first]}"
            )
