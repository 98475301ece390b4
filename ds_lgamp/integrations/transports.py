"""Gives the process groups of a job the networks of its cluster file, also those that a host or a script makes."""

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch.distributed as dist

from ds_lgamp.integrations.hosts import replace_attribute
from ds_lgamp.runtime.transport import gloo_through, nccl_options, transport_of


def install_transports(undo: ExitStack) -> None:
    """From now on, groups are made on the network that :func:`ds_lgamp.runtime.transport.transport_of` names, until
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
