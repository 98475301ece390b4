"""Imagined ranks: one process plays one rank of many, and collectives move nothing."""

import functools
import inspect
import os
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_lgamp.integrations.hosts import replace_attribute


def imagine_ranks(ranks: int, rank: int) -> None:
    """Makes this process rank ``rank`` of ``ranks``, without the others.

    The environment is as a launcher sets it. The process group is torch's fake one: its collectives return at once, as
    if every rank had sent what this one did.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    for name, value in {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    new_group, signature = dist.new_group, inspect.signature(dist.new_group)

    @functools.wraps(new_group)
    def imagined_group(*arguments: Any, **options: Any) -> Any:
        """Makes a group of the fake backend, whichever backend is asked for."""
        named = signature.bind(*arguments, **options).arguments
        return new_group(**{**named, "backend": None, "pg_options": None})

    def nothing(*arguments: Any, **options: Any) -> None:
        """Replaces what the fake group does not offer. Objects that a rank would receive stay as they are."""

    replacements: dict[str, Any] = {"new_group": imagined_group}
    replacements |= dict.fromkeys(("init_process_group", "broadcast_object_list", "monitored_barrier"), nothing)
    # Never closed: this process imagines its ranks until it ends.
    undo = ExitStack()
    for name, replacement in replacements.items():
        for module in (dist, dist.distributed_c10d):
            replace_attribute(module, name, replacement, undo)
