"""A lower bound of a step's time, which ignores its waits."""

from ds_lgamp.planner.cluster import Cluster
from ds_lgamp.planner.compute import Compute, Seconds
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.efficiency import Efficiency
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.offload import host_seconds


class Bound:
    """The least seconds that a step can take: compute that is spread evenly, and the bubble."""

    def __init__(self, model: Model, cluster: Cluster) -> None:
        self._model, self._compute = model, Compute(cluster, Efficiency(**cluster.efficiency))
        self._layers: dict[tuple[int, int, bool], Seconds] = {}

    def on_host(self, of: Configuration) -> float:
        """Returns the least seconds of loads, of stores and of the host's updates, with offloading."""
        if of.offload is None:
            return 0.0
        own = self._model.layers * self._model.layer_parameters / of.tensor_ranks / of.pipeline_ranks
        return max(host_seconds(self._compute, of, own))

    def seconds(self, of: Configuration) -> float:
        key = of.micro_batch, of.tensor_ranks, of.fused_attention
        if key not in self._layers:
            self._layers[key] = self._compute.layer(self._model, *key)
        layer = self._layers[key]
        # The only chunk of a single pipeline rank is not recomputed.
        again = layer.forward if of.recompute == "full" and of.chunks > 1 else 0.0
        rank = (layer.forward + layer.backward + again) * self._model.layers / of.pipeline_ranks
        return rank * (of.micro_batches + (of.pipeline_ranks - 1) / of.chunks_per_rank)
