"""Gives every process group the network that its ranks share."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from ds_lgamp.cost.assignment import Assignment, Transport

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable that tells gloo its network interface. gloo reads it whenever a group is made, and takes no options."""
_current: list[Assignment] = []


def use(assignment: Assignment) -> None:
    """Sets the assignment of this process."""
    _current[:] = [assignment]


def current() -> Assignment | None:
    """Returns the assignment of this process; None if there is no cluster file."""
    return _current[0] if _current else None


def transport_of(ranks: Sequence[int] | None) -> Transport | None:
    """Returns how this rank communicates with the others of ``ranks``, all ranks for None; None if it is free to
    choose."""
    assignment = current()
    if assignment is None:
        return None
    own = int(os.environ["RANK"])
    everyone = range(assignment.ranks) if ranks is None else ranks
    return assignment.transport([own, *everyone]) if own in everyone else None


@contextmanager
def gloo_through(transport: Transport | None) -> Iterator[None]:
    """Inside the block, gloo makes groups on the interface of ``transport``, if it names one."""
    if transport is None or transport.interface is None:
        yield
        return
    before = os.environ.get(GLOO_INTERFACE)
    os.environ[GLOO_INTERFACE] = transport.interface
    try:
        yield
    finally:
        if before is None:
            del os.environ[GLOO_INTERFACE]
        else:
            os.environ[GLOO_INTERFACE] = before


def nccl_options(options: Any, transport: Transport | None) -> Any:
    """Returns ``options`` of NCCL with the network of ``transport``, unless they name one already; new options if there
    are none."""
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if transport is None or transport.nccl_network is None or nccl is None:
        return options
    options = nccl.Options() if options is None else options
    if options.config.net_name is None:
        options.config.net_name = transport.nccl_network
    return options
