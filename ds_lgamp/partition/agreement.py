"""Lets ranks agree before they act, so that they go on together or fail together."""

from typing import Any

import torch.distributed as dist


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
