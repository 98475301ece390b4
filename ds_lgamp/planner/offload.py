"""Plans whose optimizer's state, parameters or inputs of chunks lie in the memory of the host."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from ds_lgamp.planner.activations import layer_bytes
from ds_lgamp.planner.cluster import Cluster
from ds_lgamp.planner.compute import ELEMENT, Compute
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.memory import ConfigurationMemory
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


def offloaded(
    in_memory: Iterable[tuple[ConfigurationMemory, Configuration]], cluster: Cluster
) -> Iterator[Configuration]:
    """Yields each layered configuration with its optimizer on the host, and with its parameters there too at stage 3,
    if a search can run it on the clock and the GPU may hold the rest. Alone, a data-parallel rank is at stage 3. Where
    the GPU cannot hold the rest with inputs of chunks, these are on the host too, or alone.

    Args:
        in_memory: configurations without offloading, and what they need.
    """
    known = set()
    for needed, one in in_memory:
        quick = one.computes <= MOST_COMPUTES
        if one.schedule != "layered" or one.micro_batch_outer or one.hierarchy is not None or not quick:
            continue
        stage = one.zero_stage if one.data_ranks > 1 else 3
        rest = needed.total - needed.master_weights - needed.optimizer_state - needed.gradients
        ways = ((None, needed.total), ("optimizer", rest), ("parameters", rest - needed.weights))
        for offload, stays in ways:
            lacks_room = stays > cluster.memory
            can_offload = offload is None or stage == 3 or (stage > 0 and offload == "optimizer")
            stores_inputs = lacks_room and one.recompute == "full"
            fits = stays - needed.stored * stores_inputs <= cluster.memory
            if can_offload and fits and (offload is not None or stores_inputs):
                at = one.zero_stage if offload is None else stage
                made = replace(one, zero_stage=at, offload=offload, stores_inputs=stores_inputs)
                if made not in known:
                    known.add(made)
                    yield made
