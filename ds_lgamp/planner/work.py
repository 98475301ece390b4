"""What the parts of a step take on one tensor-parallel rank, and the step on the clock, which is exact where the closed
form assumes equal ranks."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ds_lgamp.cost.traffic import hidden_bytes
from ds_lgamp.cost.units import ElementBytes, aligned, packed_bytes
from ds_lgamp.planner.activations import end_bytes, layer_bytes
from ds_lgamp.planner.cluster import Cluster, Efficiency
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.hardware import ELEMENT, Compute, Group, Network, Seconds, group_of, network_of
from ds_lgamp.planner.memory import default_software, element_bytes
from ds_lgamp.planner.model import Model
from ds_lgamp.schedule.costs import Costs, DiskSeconds, links_of
from ds_lgamp.schedule.program import build_timed_program
from ds_lgamp.schedule.simulate import simulate

MOST_COMPUTES = 300_000
"""Forwards and backwards that the clock runs in a few seconds."""


class End(NamedTuple):
    """The embedding, or the head with the loss."""

    chunk: int
    """-1 is the last chunk."""
    seconds: Seconds
    parameters: float
    frozen: float = 0.0


_EXCHANGES = 2
"""All-to-alls of a forward through a layer with divided experts: tokens go to their experts, and results come back."""


class Layer(NamedTuple):
    """What a layer takes for one micro-batch on one tensor-parallel rank, and what it holds there."""

    seconds: Seconds
    parameters: float
    """What all data-parallel ranks have."""
    experts: float = 0.0
    """Parameters that only some data-parallel ranks have, because ranks divide experts."""
    frozen: float = 0.0
    """Parameters that do not train, and are none of the others."""
    exchange: float = 0.0
    """Seconds of the all-to-alls of a forward among ranks that divide experts: tokens go to their experts, and
    results come back. A backward has as many."""


def total(counts: Iterable[int], each: Iterable[float]) -> float:
    """Returns the sum over kinds of layers: how many there are of each kind, times what one of it takes."""
    return sum(count * own for count, own in zip(counts, each))


class Collectives(NamedTuple):
    """Seconds of the collectives of one chunk over its data-parallel ranks."""

    gather: float
    reduce: float
    refresh: float = 0.0
    """Between nodes, with hierarchical shards, like ``combine``."""
    combine: float = 0.0


class HostSeconds(NamedTuple):
    """What one chunk takes between its GPU and the host."""

    load: float
    """Copying a rank's part of its weights to the GPU."""
    store: float
    """Copying that part of its gradient to the host."""
    update: float
    """Updating that part on the host."""
    disk: DiskSeconds | None = None
    """What a disk moves for all that; None without one."""

    @property
    def longest(self) -> float:
        """What takes longest if everything goes on beside everything else. A disk reads at least what it writes."""
        read = self.disk.loaded + self.disk.read if self.disk is not None else 0.0
        return max(self.load, self.store, self.update, read)


@dataclass(frozen=True)
class Work:
    """A step of ``configuration``: its parts, without waits."""

    model: Model
    cluster: Cluster
    configuration: Configuration

    @cached_property
    def compute(self) -> Compute:
        return Compute(self.cluster, Efficiency(**self.cluster.efficiency))

    @cached_property
    def element(self) -> ElementBytes:
        return element_bytes(self.configuration, default_software(self.configuration))

    @cached_property
    def network(self) -> Network:
        return network_of(self.cluster, self.configuration.gpus, self.compute.efficiency)

    @cached_property
    def layers(self) -> list[Layer]:
        """One layer of every kind."""
        of, ranks, found = self.configuration, self.configuration.tensor_ranks, []
        for _, kind in self.model.divided(of.expert_ranks).kinds:
            seconds, experts = (
                self.compute.layer(kind, of.micro_batch, ranks, of.fused_attention),
                kind.divided_parameters,
            )
            exchange = _EXCHANGES * self._exchange(kind) if experts else 0.0
            frozen = kind.layer_parameters if kind.adapters else 0
            found.append(Layer(seconds, (kind.trained_in_layer - experts) / ranks, experts, frozen, exchange))
        return found

    def _exchange(self, kind: Model) -> float:
        """Seconds of an all-to-all: every token goes to each of its experts, which are spread evenly."""
        group = group_of(self.cluster, self.configuration.gpus, kind.expert_ranks, self.configuration.tensor_ranks)
        return self.network.all_to_all(group, ELEMENT * self._tokens * kind.experts_per_token * kind.hidden_size)

    @cached_property
    def ends(self) -> tuple[End, End]:
        model, sequences, tensor_ranks = self.model, self.configuration.micro_batch, self.configuration.tensor_ranks
        words = 0.0 if model.tied_embeddings and not self._ends_lie_apart else model.vocabulary_size * model.hidden_size
        head = self.compute.head(model, sequences, tensor_ranks)
        if not end_bytes(model, sequences, tensor_ranks, default_software(self.configuration)).waiting:
            # In pieces, the head computes both parts of its backward at once.
            head = replace(head, weights=0.0)
        first = End(
            0, self.compute.embedding(model, sequences, tensor_ranks), model.embedding_parameters / tensor_ranks
        )
        last = End(-1, head, words / tensor_ranks)
        if not model.adapters:
            return first, last
        adapters = float(model.adapters_of(model.matrices_at_end))
        return first._replace(parameters=0.0, frozen=first.parameters), last._replace(
            parameters=adapters, frozen=last.parameters
        )

    @property
    def _ends_lie_apart(self) -> bool:
        placement = self.configuration.placement
        return placement[0] != placement[-1]

    @cached_property
    def tensor_sum(self) -> float:
        """Seconds of one sum over the tensor-parallel ranks. An end of the model needs one for each micro-batch."""
        group = group_of(self.cluster, self.configuration.gpus, self.configuration.tensor_ranks, 1)
        return self.network.all_reduce(group, ELEMENT * self._tokens * self.model.hidden_size)

    @property
    def _tokens(self) -> int:
        return self.configuration.micro_batch * self.model.sequence_length

    @property
    def messages_cross_nodes(self) -> bool:
        """Whether pipeline ranks send messages from node to node."""
        return self.configuration.gpus > self.cluster.gpus_per_node

    @cached_property
    def message(self) -> tuple[float, float]:
        """Seconds of a message between pipeline ranks, and those for which it occupies its link; 0 with one pipeline
        rank."""
        if self.configuration.pipeline_ranks == 1:
            return 0.0, 0.0
        # Under sequence parallelism each tensor rank has and sends a part (arXiv 2205.05198).
        elements = self._tokens * self.model.hidden_size / self.configuration.tensor_ranks
        rounded = hidden_bytes(round(elements), self.configuration.activation_dtype)
        size = ELEMENT * elements if rounded is None else rounded
        hop = self.network.message(self.messages_cross_nodes, size)
        transfer = hop - self.network.message(self.messages_cross_nodes, 0)
        return hop if rounded is None else hop + self.compute.rounding(elements, elements), transfer

    @cached_property
    def data_group(self) -> Group:
        """All data-parallel ranks."""
        of = self.configuration
        return group_of(self.cluster, of.gpus, of.data_ranks, of.tensor_ranks)

    @cached_property
    def expert_group(self) -> Group:
        """The data-parallel ranks that have the same experts, where ranks divide them."""
        of = self.configuration
        return group_of(self.cluster, of.gpus, of.data_ranks // of.expert_ranks, of.tensor_ranks * of.expert_ranks)

    def gather(self, parameters: float, experts: float = 0.0, frozen: float = 0.0) -> float:
        """Returns the seconds of a gather of so many weights over the data-parallel ranks, and then of so many of
        experts over those that have the same ones. Each rank rounds its part and restores all.

        At stage 3 ``frozen`` weights follow or, if the host has them, come from there at the same time."""
        if frozen and self.configuration.zero_stage == 3:
            own = self.gather(parameters, experts)
            if self.configuration.keep_frozen == "host":
                return max(own, self.compute.transfer(ELEMENT * frozen))
            return own + (0.0 if self.configuration.keeps_frozen_whole else self.gather(frozen))
        gather, ranks, bits = self.network.all_gather, self.data_group.size, self.configuration.weight_bits
        if bits is not None and ranks > 1:
            return gather(self.data_group, _rounded_bytes(parameters, bits)) + self.compute.rounding(
                parameters / ranks, parameters
            )
        seconds = gather(self.data_group, ELEMENT * parameters)
        return seconds + (gather(self.expert_group, ELEMENT * experts) if experts else 0.0)

    def reduction(self, parameters: float, experts: float = 0.0) -> float:
        """Returns the seconds of the reduction of as many gradients. Rounded ones take an all-to-all, because nothing
        adds them up on their way."""
        bits = self.configuration.gradient_bits
        if bits is not None and self.data_group.size > 1:
            seconds = self.network.all_to_all(self.data_group, _rounded_bytes(parameters, bits))
            return seconds + self.compute.rounding(parameters, parameters)
        reduce = self.network.all_reduce if self.configuration.zero_stage == 0 else self.network.reduce_scatter
        seconds = reduce(self.data_group, ELEMENT * parameters)
        return seconds + (reduce(self.expert_group, ELEMENT * experts) if experts else 0.0)

    def collectives(self, parameters: float, experts: float = 0.0, frozen: float = 0.0) -> Collectives:
        """Returns what a chunk with so many parameters, so many of ``experts`` that ranks divide, and so many that are
        ``frozen``, takes."""
        of, network, hierarchy = self.configuration, self.network, self.configuration.hierarchy
        if hierarchy is None:
            return Collectives(self.gather(parameters, experts, frozen), self.reduction(parameters, experts))
        size = ELEMENT * parameters
        node = group_of(self.cluster, of.gpus, hierarchy.node_ranks, of.tensor_ranks)
        stride = of.tensor_ranks * hierarchy.node_ranks
        peers = group_of(self.cluster, of.gpus, hierarchy.nodes(of.data_ranks), stride)
        kept = size / hierarchy.node_ranks
        combine = network.all_reduce if hierarchy.replicated else network.reduce_scatter
        return Collectives(
            network.all_gather(node, size) + (network.all_gather(node, ELEMENT * frozen) if frozen else 0.0),
            network.reduce_scatter(node, size),
            0.0 if hierarchy.replicated else network.all_gather(peers, kept),
            combine(peers, kept),
        )

    @cached_property
    def tied_sum(self) -> float:
        """Seconds of the sum of the first and the last pipeline rank's gradients of tied embeddings.

        This project's engine sums what every rank updates, in the bits of the optimizer. Others sum whole gradients.
        """
        model, of = self.model, self.configuration
        if not model.tied_embeddings or not self._ends_lie_apart or model.adapters:
            return 0.0
        size = model.vocabulary_size * model.hidden_size / of.tensor_ranks
        size *= self.element.sums / of.shards if is_own(of) else ELEMENT
        return self.network.all_reduce(Group(1, 2) if self.messages_cross_nodes else Group(2, 1), size)

    def costs(self) -> Costs:
        """Returns what the actions of the configuration's program take, in seconds. Chunks differ in their layers;
        embedding and head belong to the first and the last one."""
        of, compute, sums = self.configuration, self.compute, 2 * self.tensor_sum
        counts, layers = of.kinds_of_chunks(self.model), self.layers
        forward = [total(own, [layer.seconds.forward + sums + layer.exchange for layer in layers]) for own in counts]
        backward = [total(own, [layer.seconds.backward + sums + layer.exchange for layer in layers]) for own in counts]
        recompute = list(forward)
        later = [total(own, [layer.seconds.weights for layer in layers]) for own in counts]
        elements = [total(own, [layer.parameters for layer in layers]) for own in counts]
        experts = [total(own, [layer.experts for layer in layers]) for own in counts]
        frozen = [total(own, [layer.frozen for layer in layers]) for own in counts]
        for chunk, end, own, still in self.ends:
            forward[chunk] += end.forward + self.tensor_sum / 2
            backward[chunk] += end.backward + self.tensor_sum / 2
            later[chunk] += end.weights
            elements[chunk] += own
            frozen[chunk] += still
        moves = [self.collectives(*each) for each in zip(elements, experts, frozen)]
        spec, parts = of.spec, list(map(of.part, elements, experts))
        loaded = [still / of.shards if of.offload == "parameters" else 0.0 for still in frozen]
        hosts = [host_seconds(compute, of, *each) for each in zip(parts, loaded)] if spec.offload else []
        updates = [compute.update(part, of.state) for part in parts]
        hop, message = self.message
        links, ends = links_of(spec), {of.placement[0], of.placement[-1]}
        return Costs(
            forward,
            backward,
            recompute,
            gather=[each.gather for each in moves],
            reduce=[each.reduce for each in moves],
            hop=dict.fromkeys(links, hop),
            message=dict.fromkeys(links, message),
            update=[host.update for host in hosts] or updates,
            tied=[self.tied_sum if rank in ends else 0.0 for rank in range(of.pipeline_ranks)],
            shares_card=self.messages_cross_nodes,
            refresh=[each.refresh for each in moves] if spec.hierarchy else (),
            combine=[each.combine for each in moves] if spec.hierarchy else (),
            load=[host.load for host in hosts],
            store=[host.store for host in hosts],
            disk=[host.disk for host in hosts if host.disk is not None],
            weights=[compute.transfer(ELEMENT * (own + more)) for own, more in zip(elements, experts)]
            if spec.stores_weights
            else (),
            input=[self._input_seconds] * spec.chunks if spec.stores_inputs else (),
            exchange=[total(own, [layer.exchange for layer in layers]) for own in counts],
            exchanges=[total(own, [_EXCHANGES * (layer.exchange > 0) for layer in layers]) for own in counts],
            weights_backward=later if spec.split_chunks else (),
        )

    @property
    def _input_seconds(self) -> float:
        """Seconds that the input of a chunk takes between GPU and host, for one micro-batch."""
        of = self.configuration
        layer = layer_bytes(self.model, of.micro_batch, of.tensor_ranks, default_software(of))
        return self.compute.transfer(layer.result)


def _rounded_bytes(elements: float, bits: int) -> float:
    """Returns the bytes in which ``elements`` travel in blocks with scales."""
    block = aligned(1)
    return elements * packed_bytes(block, bits) / block


def host_seconds(compute: Compute, of: Configuration, part: float, frozen: float = 0.0) -> HostSeconds:
    """Returns the seconds of a chunk of whose parameters a rank updates a ``part``, and loads a ``frozen`` one too.
    Gradients come to the host in the type of what it updates."""
    load, size = compute.transfer(ELEMENT * (part + frozen)), element_bytes(of, default_software(of))
    seconds = HostSeconds(load, compute.transfer(size.master * part), compute.host_update(part, of.state))
    if not of.on_disk:
        return seconds
    loads = of.offload == "parameters"
    copies = size.master if size.weights < size.master else 0
    state, weights = copies + (size.optimizer or 0), size.weights if loads else 0
    disk = DiskSeconds(
        loaded=compute.disk(ELEMENT * (part + frozen)) if loads else 0.0,
        stored=compute.disk(size.master * part),
        read=compute.disk((size.master + state + weights * (size.weights == size.master)) * part),
        written=compute.disk((state + weights) * part),
    )
    return seconds._replace(disk=disk)


def is_layered(configuration: Configuration) -> bool:
    """Whether ds_lgamp runs the configuration under the layered schedule."""
    return configuration.schedule == "layered" and not configuration.micro_batch_outer


def is_own(configuration: Configuration) -> bool:
    """Whether the configuration is one of ds_lgamp's: it is under the layered schedule, a vee, has backwards in two
    parts, or recomputes only what does not fit. Others run as Megatron-LM and DeepSpeed run them."""
    of = configuration
    return is_layered(of) or of.schedule == "zbv" or of.split_backward > 0 or of.recompute == "auto"


def is_quick(configuration: Configuration) -> bool:
    """Whether the clock can run the configuration, which is one of ds_lgamp's, in seconds."""
    return is_own(configuration) and configuration.computes <= MOST_COMPUTES


def is_by_formula(of: Configuration) -> bool:
    """Whether a search predicts by the formula what the clock is quick with."""
    return is_quick(of) and not of.takes_clock


def exact_seconds(model: Model, cluster: Cluster, configuration: Configuration) -> float:
    """Returns the seconds of a step of this project's engine, by the clock."""
    spec, costs = configuration.spec, Work(model, cluster, configuration).costs()
    return simulate(spec, build_timed_program(spec), costs, sends_at_once=True).step_time
