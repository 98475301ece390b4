"""Gives the process groups of a job the networks of its cluster file, also those that a host or a script makes."""

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist

from ds_lgamp.cost.assignment import Transport
from ds_lgamp.integrations.replacing import replace_attribute
from ds_lgamp.watch.this_rank import this_rank

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable that tells gloo its network interface. gloo reads it whenever a group is made, and takes no options."""


def transport_of(ranks: Sequence[int] | None) -> Transport | None:
    """Returns how this rank communicates with the others of ``ranks``, all ranks for None; None if it is free to
    choose."""
    assignment = this_rank.assignment
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


def install_transports(undo: ExitStack) -> None:
    """From now on, groups are made on the network that :func:`transport_of` names, until
    ``undo`` is closed."""

    def all_ranks(arguments: dict[str, Any]) -> None:
        return None

    def of_group(arguments: dict[str, Any]) -> Any:
        return arguments.get("ranks")

    def of_split(arguments: dict[str, Any]) -> Any:
        groups = arguments.get("split_ranks") or []
        return next((ranks for ranks in groups if dist.get_rank() in ranks), [])

    for name, ranks_of in (("init_process_group", all_ranks), ("new_group", of_group), ("split_group", of_split)):
        stock = getattr(dist, name, None)
        if stock is not None:
            for module in (dist, dist.distributed_c10d):
                replace_attribute(module, name, _through_networks(stock, ranks_of), undo)


def _through_networks(stock: Callable[..., Any], ranks_of: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Wraps a function that makes groups. ``ranks_of`` finds the group's ranks in its arguments."""
    signature = inspect.signature(stock)

    @wraps(stock)
    def make(*positional: Any, **options: Any) -> Any:
        arguments = signature.bind(*positional, **options).arguments
        transport = transport_of(ranks_of(arguments))
        if _runs_on_nccl(arguments.get("backend")):
            arguments["pg_options"] = nccl_options(arguments.get("pg_options"), transport)
        with gloo_through(transport):
            return stock(**arguments)

    return make


def _runs_on_nccl(backend: Any) -> bool:
    """Whether a group of ``backend`` has options of NCCL. None stands for the default group's backend."""
    if backend is None:
        backend = dist.get_backend() if dist.is_initialized() else ""
    return "nccl" in str(backend)
