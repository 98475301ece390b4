"""Plans whose optimizer's state, parameters or inputs of chunks lie in the memory of the host."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from ds_lgamp.planner.activations import layer_bytes
from ds_lgamp.planner.cluster import Cluster
from ds_lgamp.planner.compute import ELEMENT, Compute
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.memory import of_ranks
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.sizes import default_software

MOST_COMPUTES = 10_000
"""Forwards and backwards of a step that a search runs on the clock. Offloading has no closed form."""
_GRADIENT = 4
"""Bytes of a stored gradient."""


class HostSeconds(NamedTuple):
    """What one chunk takes between its GPU and the host."""

    load: float
    """Copying a rank's part of its weights to the GPU."""
    store: float
    """Copying that part of its gradient to the host."""
    update: float
    """Updating that part on the host."""


def host_seconds(compute: Compute, configuration: Configuration, parameters: float) -> HostSeconds:
    """Returns the seconds of a chunk of so many ``parameters`` on one tensor-parallel rank."""
    part = parameters / configuration.shards
    return HostSeconds(compute.transfer(ELEMENT * part), compute.transfer(_GRADIENT * part), compute.host_update(part))


def input_seconds(compute: Compute, model: Model, configuration: Configuration) -> float:
    """Returns the seconds that the input of a chunk takes between GPU and host, for one micro-batch."""
    software = default_software(configuration)
    return compute.transfer(layer_bytes(model, configuration.micro_batch, configuration.tensor_ranks, software).result)


def ways_to_offload(configuration: Configuration) -> list[Configuration]:
    """Returns a layered configuration with its optimizer on the host, and with its parameters there too at stage 3, if
    a search can run it on the clock. Alone, a data-parallel rank is at stage 3. The configuration itself comes first,
    because its inputs of chunks may lie on the host alone."""
    one = configuration
    if one.schedule != "layered" or one.micro_batch_outer or one.hierarchy is not None or one.computes > MOST_COMPUTES:
        return []
    stage = one.zero_stage if one.data_ranks > 1 else 3
    ways = [("optimizer", stage > 0), ("parameters", stage == 3)]
    return [one, *(replace(one, zero_stage=stage, offload=offload) for offload, is_possible in ways if is_possible)]


def with_room(
    model: Model, ways: Iterable[tuple[Configuration, Configuration]], cluster: Cluster
) -> Iterator[Configuration]:
    """Yields each way to offload if the GPU may hold the rest. Where it cannot hold the rest with inputs of chunks,
    these are on the host too.

    Args:
        ways: configurations without offloading, each with one of its :func:`ways_to_offload`.
    """
    known = set()
    for one, way in ways:
        stays = _stays(model, one, way, cluster)
        if stays is not None and stays.uses_host and stays not in known:
            known.add(stays)
            yield stays


def _stays(model: Model, one: Configuration, way: Configuration, cluster: Cluster) -> Configuration | None:
    """Returns ``way``, with inputs of chunks on the host if a rank has no room for them; None if that is not enough."""
    stores_inputs = False
    for needed in of_ranks(model, one):
        stays = needed.total
        if way.offload is not None:
            stays -= needed.master_weights + needed.optimizer_state + needed.gradients
        if way.offload == "parameters":
            stays -= needed.weights
        stores_inputs |= stays > cluster.memory and one.recompute == "full"
        if stays - needed.stored * stores_inputs > cluster.memory:
            return None
    return replace(way, stores_inputs=stores_inputs)
