"""Lets ranks agree before they act, so that they go on together or fail together."""

from functools import lru_cache
from typing import Any

import torch.distributed as dist


def host_group() -> dist.ProcessGroup:
    """Returns the group of all ranks through which hosts talk, without their devices. It runs on gloo.

    The first call is collective over all ranks, unless the default group runs on gloo itself.
    """
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialised"
    return world if dist.get_backend() == "gloo" else _gloo_beside(world)


@lru_cache(maxsize=1)
def _gloo_beside(default: dist.ProcessGroup) -> dist.ProcessGroup:
    """Makes one gloo group for each default group."""
    return dist.new_group(backend="gloo")


def everyone(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the ``own`` value of every rank of ``group``, by rank. Collective; the default group has all ranks."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, own, group=group)
    return values


def raise_everywhere(complaint: str | None, kind: type[Exception], group: dist.ProcessGroup | None = None) -> None:
    """Raises ``kind`` on every rank if any rank has a complaint, with the complaint of the first such rank.

    Collective; the default group has all ranks.
    """
    first = next((text for text in everyone(complaint, group) if text), None)
    if first:
        raise kind(first)
