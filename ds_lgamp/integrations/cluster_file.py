"""What a cluster file changes: the networks of the job's process groups, and the speeds that the block leaves out."""

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist

from ds_lgamp.config import BLOCK
from ds_lgamp.cost.assignment import Assignment, Transport
from ds_lgamp.integrations.hosts import replace_attribute
from ds_lgamp.watch.this_rank import this_rank

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable that tells gloo its network interface. gloo reads it whenever a group is made, and takes no options."""


def with_speeds(config: dict[str, Any], assignment: Assignment | None, replicas: bool = True) -> dict[str, Any]:
    """Returns the configuration with ``pipeline_rank_speeds`` and ``data_rank_speeds`` in its block.

    Keys that stand there already stay. None is added for ranks of equal speeds, nor where another key of the block
    excludes it: ``layers_per_chunk`` sizes the chunks itself, and neither groups of micro-batches nor interleaved 1F1B
    take unequal numbers of them at every stage.

    Args:
        assignment: of ranks to the nodes of a cluster; None if there is no cluster file.
        replicas: whether the engine can give data-parallel ranks unequal numbers of micro-batches.
    """
    block = config.get(BLOCK)
    if assignment is None or not isinstance(block, dict):
        return config
    pipeline, data = work_speeds(assignment)
    added = {}
    if len(set(pipeline)) > 1 and "layers_per_chunk" not in block:
        added["pipeline_rank_speeds"] = pipeline
    in_one_group = block.get("micro_batch_group", "all") == "all" and block.get("schedule") != "interleaved_1f1b"
    if len(set(data)) > 1 and replicas and in_one_group:
        added["data_rank_speeds"] = data
    return {**config, BLOCK: {**added, **block}}


def work_speeds(assignment: Assignment) -> tuple[list[float], list[float]]:
    """Returns the speeds by which pipeline ranks share layers, and data-parallel ranks micro-batches.

    A pipeline rank is as fast as its slowest GPU. The speed of a data-parallel rank is the lowest ratio of one of its
    GPUs to the speed of that GPU's pipeline rank, because the layers make up for the rest. If each GPU's speed is a
    product of the two, all GPUs finish at the same time.
    """
    pipeline = list(assignment.pipeline_speeds)
    data = [
        min(
            assignment.gpu_speeds[assignment.rank(pipeline_rank, data_rank, tensor_rank)] / speed
            for pipeline_rank, speed in enumerate(pipeline)
            for tensor_rank in range(assignment.tensor_ranks)
        )
        for data_rank in range(assignment.data_ranks)
    ]
    return pipeline, data


def transport_of(ranks: Sequence[int] | None) -> Transport | None:
    """Returns how this rank communicates with the other ranks of ``ranks``, where None means all ranks; None if it is
    free to choose."""
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
