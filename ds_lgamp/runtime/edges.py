"""Connects the ranks of every pipeline to those with which they exchange messages."""

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from ds_lgamp.partition.agreement import everyone, own_of_disjoint
from ds_lgamp.runtime.links import RESET, Endpoint, Ends, Links, Route
from ds_lgamp.schedule.placement import Placement
from ds_lgamp.schedule.spec import ActivationType

_KINDS = ("activations", "gradients")
_HEADER_TAG = len(_KINDS)
MAX_BLOCKS = 4
"""How many thread blocks NCCL may use for a link. A receive that waits keeps as many multiprocessors from computing.
The number was never timed on a GPU."""

Edge = tuple[int, int]
"""Two ranks with neighbouring chunks: the sender and the receiver of activations."""


def posts_on_arrival() -> bool:
    """Whether programs of this job must post receives on arrival: with any backend but gloo, operations run in order on
    a device's streams, which may share hardware queues."""
    return dist.get_backend() != "gloo"


def all_pipelines(pipeline: dist.ProcessGroup) -> list[list[int]]:
    """Returns the global ranks of every pipeline. Collective over all ranks."""
    pipelines = {tuple(ranks) for ranks in everyone(dist.get_process_group_ranks(pipeline))}
    return [list(ranks) for ranks in sorted(pipelines)]


def pipeline_links(
    pipelines: Sequence[Sequence[int]],
    placement: Placement,
    device: torch.device,
    hosts: dist.ProcessGroup | None = None,
    dynamic: bool = False,
    advice: str = RESET,
    narrow: ActivationType | None = None,
) -> Links:
    """Creates the links of this rank in its pipeline. Collective over all ranks.

    Args:
        pipelines: the global ranks of every pipeline, in pipeline order.
        placement: the pipeline rank of every chunk, in every pipeline. It says which ranks are neighbours.
        hosts: a group of all ranks on gloo, which carries headers; default the default group.
        dynamic: whether the shapes of a chunk's results may differ between micro-batches.
        advice: the fix that the error names if shapes differ unexpectedly.
        narrow: the type in which hidden states and their gradients travel; None leaves them as they are.
    """
    own, edges = dist.get_rank(), edges_of(placement)
    pipeline = next(list(ranks) for ranks in pipelines if own in ranks)
    on_arrival = posts_on_arrival()
    groups = _edge_groups(pipelines, edges, device) if on_arrival and edges else {}

    def ends(edge: Edge, peer: int) -> Ends:
        ranks = pipeline[edge[0]], pipeline[edge[1]]
        activations, gradients = (Endpoint(peer, groups.get((ranks, kind)), tag) for tag, kind in enumerate(_KINDS))
        return Ends(activations, gradients, Endpoint(peer, hosts, _HEADER_TAG))

    before = {edge[0]: ends(edge, pipeline[edge[0]]) for edge in edges if pipeline[edge[1]] == own}
    after = {edge[1]: ends(edge, pipeline[edge[1]]) for edge in edges if pipeline[edge[0]] == own}
    return Links(device, Route(tuple(pipeline), before, after), dynamic, on_arrival, advice, narrow)


def edges_of(placement: Placement) -> list[Edge]:
    """Returns the edges over which activations travel, by pipeline rank, in the order of the model."""
    return list(dict.fromkeys((source, target) for source, target in pairwise(placement) if source != target))


def edge_colours(pipelines: Sequence[Sequence[int]], edges: Sequence[Edge]) -> list[list[Edge]]:
    """Returns the ``edges`` of all pipelines in colours, by global rank. No rank has two edges of one colour.

    Each edge takes the first colour that it may: two for a ring, three for one of an odd number of ranks, four for a
    vee.
    """
    colours: list[list[Edge]] = []
    for edge in edges:
        free = (colour for colour in colours if not any(set(edge) & set(other) for other in colour))
        colour = next(free, None)
        if colour is None:
            colours.append(colour := [])
        colour.append(edge)
    return [
        [(pipeline[source], pipeline[target]) for pipeline in pipelines for source, target in colour]
        for colour in colours
    ]


def _edge_groups(
    pipelines: Sequence[Sequence[int]], edges: Sequence[Edge], device: torch.device
) -> dict[tuple[Edge, str], dist.ProcessGroup]:
    """Returns the groups of this rank by edge and kind of message. Collective over all ranks.

    NCCL runs everything on a communicator in order, so two links or kinds that share one can deadlock. Every edge and
    kind therefore has a group of its own. All edges of a colour open at once, so that the time does not grow with the
    number of ranks.
    """
    own, world = dist.get_rank(), dist.group.WORLD
    assert world is not None, "torch.distributed is initialised"
    timeout = _timeout(world, device)
    groups = {}
    for alike in edge_colours(pipelines, edges):
        for kind in _KINDS:
            group = own_of_disjoint(alike, timeout, partial(link_options, timeout))
            for edge in alike:
                if group is not None and own in edge:
                    _open_communicator(group, edge if kind == "activations" else edge[::-1], device)
                    groups[edge, kind] = group
    return groups


def link_options(timeout: timedelta | None) -> Any:
    """Returns NCCL's options for a link, also where hosts have another backend; None without NCCL, or if this torch
    offers none."""
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    of_devices = [each.rpartition(":")[2] for each in dist.get_backend().split(",")]
    if "nccl" not in of_devices or nccl is None:
        return None
    options = nccl.Options()
    options.config.max_ctas = MAX_BLOCKS
    if timeout is not None:
        options._timeout = timeout  # torch warns if it differs from the group's.
    return options


def _timeout(world: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Returns the timeout of the default group, because torch would give new groups its own default. None if the group
    has no options."""
    try:
        options = world._get_backend(device).options
    except RuntimeError:
        return None
    return None if options is None else options._timeout


def _open_communicator(group: dist.ProcessGroup, link: Edge, device: torch.device) -> None:
    """Sends a first message over ``link``, from its first rank to its second, so that the connection exists before
    receives are posted.

    NCCL connects two ranks when both call. A rank that posted a receive first would wait there for a peer that does the
    same on another link.
    """
    message = torch.zeros(1, device=device)
    if dist.get_rank() == link[0]:
        dist.send(message, link[1], group=group)
    else:
        dist.recv(message, link[0], group=group)
