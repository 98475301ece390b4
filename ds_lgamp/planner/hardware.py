"""How long a GPU computes, and how long messages and collectives take.

A kernel is limited by arithmetic or by memory, and the host must launch it. The bytes that kernels move are counted for
16-bit activations and for kernels as Megatron-LM runs them (arXiv 2104.04473): a fused softmax, GELU with its bias,
dropout with its bias and the residual.
"""

from dataclasses import dataclass
from math import ceil, gcd, log2

from ds_lgamp.planner.cluster import Cluster, Efficiency, Link
from ds_lgamp.planner.model import Model

ELEMENT = 2
"""Bytes of a weight, an activation and a gradient that travels."""
KERNELS = 20
"""Kernels of a layer's forward. The backward has twice as many."""
ADAPTER_KERNELS = 4
"""Kernels that an adapter of a matrix adds to a forward: two products, a scaling and a sum. A backward has twice as
many."""
HIDDEN_BYTES = 22
"""Bytes per token and hidden size that a forward moves on every tensor rank: two norms, each read and written, and two
additions of a residual with dropout (two read, one written, a byte of mask)."""
SCORE_BYTES, SCORE_BACKWARD_BYTES = 13, 19
"""Bytes per element of the attention scores, unless attention is one kernel: softmax, dropout and the two products
around them."""
COMPOSED_SCORE_BYTES, COMPOSED_SCORE_BACKWARD_BYTES = 24, 36
"""The same where models of transformers compute attention with sinks by several operations, each of which reads and
writes all scores: product, scale, mask, sink, maximum, difference, softmax, product; then back, with the gradient of
the maximum."""
LOSS_BYTES, LOSS_BACKWARD_BYTES = 42, 22
"""Bytes per logit: conversion to fp32, maximum, difference, exponential, sum, quotient; then back."""
ACCUMULATION_BYTES = 8
"""Bytes per parameter and micro-batch that write a gradient and add it to the sum."""
UPDATE_BYTES = {"fp32": 40, "bf16": 160, "8bit": 28}
"""Bytes per parameter of an Adam update in mixed precision, by the type of its state. fp32: norm, unscaling, master,
both moments, weights. bf16: norm and unscaling (6), copies of weight, gradient and moments in fp32 (24), the update of
these (28), and of three results the search for NaN (8), the sum with random numbers (12), the cut (8) and the result
(6). 8bit: both moments are read and written in 8 bits (4), not in fp32 (16). Those of bf16 and 8bit are counted, from
``ds_lgamp/optimizers/rounding.py`` and from what one kernel of bitsandbytes reads and writes, not compared with a
measurement."""

HOST_UPDATE_BYTES = 30
"""Bytes per parameter of an Adam update on the host: gradient, master and both moments read (16), master and both
moments written (12), weights of 16 bits written (2)."""
ROUND_BYTES, RESTORE_BYTES = 41, 25
"""Bytes per element that move where numbers of 16 bits are rounded to travel, and where they arrive, by operations in
fp32: conversion (6), magnitude (8), maximum (4), quotient (8), rounding (8), whole numbers (7); then whole numbers to
fp32 (5), product (8), and 16 bits (6) or a sum (12). These are counted, not compared with a measurement."""
ROUNDING_KERNELS = 10
"""Kernels of either."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of a forward and of the backward that follows it, without recomputation."""

    forward: float
    backward: float
    weights: float = 0.0
    """The part of the backward that computes gradients of the weights of matrix products, which may run later."""


@dataclass(frozen=True)
class Compute:
    """One GPU of a cluster at the rates that are reached."""

    cluster: Cluster
    efficiency: Efficiency

    def layer(self, model: Model, sequences: int, tensor_ranks: int, fused_attention: bool) -> Seconds:
        """Returns the seconds of one layer for a micro-batch of ``sequences``, without communication."""
        tokens, hidden = sequences * model.sequence_length, model.hidden_size
        queries, keys = model.query_width / tensor_ranks, model.key_value_width / tensor_ranks
        if model.latent is None:
            products = self._product(tokens, hidden, queries + keys) + self._product(tokens, queries, hidden)
        else:
            products = sum(self._product(tokens, rows, columns) for rows, columns in model.attention_matrices)
        feed_forward, values = self._feed_forward(model, tokens, tensor_ranks)
        products += feed_forward
        scores = sequences * model.attention_heads / tensor_ranks * model.sequence_length**2
        attention = self._attention(model, scores)
        moved = tokens * (HIDDEN_BYTES * hidden + 4 * (2 * queries + keys)) + 2 * values
        adapters = self._adapters(model, tokens)
        kernels = KERNELS + (ADAPTER_KERNELS * len(model.linear_layers) if model.adapters else 0)
        weights = model.trained_in_layer / tensor_ranks
        fused_attention &= not model.attention_masks
        score_bytes = SCORE_BYTES, SCORE_BACKWARD_BYTES
        if model.attention_masks:
            score_bytes = COMPOSED_SCORE_BYTES, COMPOSED_SCORE_BACKWARD_BYTES
        unfused = 0 if fused_attention else scores
        forward = products + attention + adapters.forward + self._moved(moved + score_bytes[0] * unfused)
        # A fused kernel computes the scores again in the backward. Frozen matrices have no gradient.
        backward = (1 if model.adapters else 2) * products + adapters.backward
        backward += (2.5 if fused_attention else 2.0) * attention
        accumulated = self._moved(ACCUMULATION_BYTES * weights)
        backward += self._moved(2 * moved + score_bytes[1] * unfused) + accumulated
        later = 0.0 if model.adapters else products + accumulated
        return self._seconds(forward, backward, later, (kernels, 2 * kernels))

    def _adapters(self, model: Model, tokens: int) -> Seconds:
        """Returns what the adapters of a layer take beside it."""
        if not model.adapters:
            return Seconds(0.0, 0.0)
        products, matrices = 0.0, model.linear_layers
        for rows, columns in matrices:
            products += self._product(tokens, rows, model.adapters) + self._product(tokens, model.adapters, columns)
        # A forward writes, scales and adds results; a backward scales their gradients, and adds gradients of inputs.
        results, inputs = sum(columns for _, columns in matrices), sum(rows for rows, _ in matrices)
        forward = products + self._moved(6 * ELEMENT * tokens * results)
        return Seconds(forward, 2 * products + self._moved(ELEMENT * tokens * (2 * results + 4 * inputs)))

    def _feed_forward(self, model: Model, tokens: int, tensor_ranks: int) -> tuple[float, float]:
        """Returns the seconds of the products of a layer's feed-forward part, and how many values they read or write
        of its size."""
        wide, routed = model.feed_forward_size / tensor_ranks, tokens * model.experts_per_token
        # With experts, each matrix sees its share of the tokens: a larger one if ranks divide experts.
        share = max(1.0, routed / model.own_experts)
        products = model.matrices * self._product(share, model.hidden_size, wide) * (routed / share)
        values = model.matrices * routed * wide
        if model.experts > 1:
            products += self._product(tokens, model.hidden_size, model.experts)
        if model.shared_size:
            shared = model.shared_size / tensor_ranks
            products += model.matrices * self._product(tokens, model.hidden_size, shared)
            values += model.matrices * tokens * shared
        return products, values

    def head(self, model: Model, sequences: int, tensor_ranks: int) -> Seconds:
        """Returns the seconds of the last norm, the head and the loss."""
        tokens, words = sequences * model.sequence_length, model.vocabulary_size / tensor_ranks
        product = self._product(tokens, model.hidden_size, words)
        weights = words * model.hidden_size
        forward = product + self._moved(LOSS_BYTES * tokens * words)
        later = 0.0 if model.adapters else product + self._moved(ACCUMULATION_BYTES * weights)
        backward = product + self._moved(LOSS_BACKWARD_BYTES * tokens * words) + later
        return self._seconds(forward, backward, later, (KERNELS, KERNELS))

    def _seconds(self, forward: float, backward: float, later: float, kernels: tuple[int, int]) -> Seconds:
        """Returns the seconds with the launches of a forward and of a backward, which have so many ``kernels``.
        ``later`` is the part of the backward for weights of matrix products, which takes its share of the launches."""
        launched = self._launched(backward, kernels[1])
        return Seconds(self._launched(forward, kernels[0]), launched, launched * later / backward)

    def embedding(self, model: Model, sequences: int, tensor_ranks: int) -> Seconds:
        """Returns the seconds of the embedding."""
        moved = HIDDEN_BYTES / 2 * sequences * model.sequence_length * model.hidden_size
        if model.adapters:
            # It is frozen, and nothing before it trains.
            return Seconds(self._moved(moved), 0.0)
        weights = model.embedding_parameters / tensor_ranks
        return Seconds(self._moved(moved), self._moved(moved + ACCUMULATION_BYTES * weights))

    def update(self, parameters: float, state: str) -> float:
        """Returns the seconds of the optimizer's update of ``parameters`` on one GPU, with ``state`` as a configuration
        has it."""
        return self._moved(UPDATE_BYTES[state] * parameters)

    def host_update(self, parameters: float, state: str) -> float:
        """Returns the seconds of the same update on the share of the host that one GPU has."""
        rate = self.cluster.host.memory_bandwidth * self.efficiency.host_memory
        longer = {"fp32": 1.0, "bf16": self.efficiency.host_rounding, "8bit": self.efficiency.host_8_bits}
        return HOST_UPDATE_BYTES * parameters / rate * longer[state]

    def transfer(self, size: float) -> float:
        """Returns the seconds of a copy of ``size`` bytes between a GPU and its host, in one direction."""
        return size / (self.cluster.host.bus * self.efficiency.bus)

    def disk(self, size: float) -> float:
        """Returns the seconds in which the disk reads ``size`` bytes for one GPU, or writes them meanwhile."""
        return size / self.cluster.host.disk

    def rounding(self, rounded: float, restored: float) -> float:
        """Returns the seconds in which so many elements are rounded to travel, and so many that arrive are restored."""
        # The host launches these kernels while others run.
        gaps = 2 * ROUNDING_KERNELS * self.efficiency.gap_seconds
        return self._moved(ROUND_BYTES * rounded + RESTORE_BYTES * restored) + gaps

    def _product(self, rows: float, inner: float, columns: float) -> float:
        """Seconds of a product of matrices. A small dimension fills the GPU's tiles and pipelines badly."""
        flops, half = 2.0 * rows * inner * columns, self.efficiency.dimension
        waste = (1 + half / rows) * (1 + half / inner) * (1 + half / columns)
        return flops * waste / (self.cluster.peak * self.efficiency.matmul)

    def _attention(self, model: Model, scores: float) -> float:
        """Seconds of the two products around ``scores`` scores."""
        half = self.efficiency.dimension
        waste = (1 + half / model.head_size) * (1 + half / model.sequence_length) ** 2
        size = (model.head_size + model.value_size) / 2
        return 4.0 * scores * size * waste / (self.cluster.peak * self.efficiency.matmul)

    def _moved(self, size: float) -> float:
        return size / (self.cluster.memory_bandwidth * self.efficiency.memory)

    def _launched(self, seconds: float, kernels: int) -> float:
        return max(kernels * self.efficiency.launch_seconds, seconds + kernels * self.efficiency.gap_seconds)


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other. Every node holds as many of them."""

    inside: int
    """Members on one node."""
    nodes: int

    @property
    def size(self) -> int:
        return self.inside * self.nodes


@dataclass(frozen=True)
class Network:
    """The links of a GPU, at the rates that are reached.

    Collectives run on rings that visit all members of a node before the next node, as NCCL builds them: each byte
    crosses the border of a node once. A ring is as fast as its slowest link. The members of a group on one node use
    their shares of the network cards together.
    """

    inside: Link
    between: Link
    """One GPU's share of its node's network cards, while all GPUs of the node send."""
    gpus: int
    """GPUs of a node that are in use."""
    crowding: float
    """See ``Efficiency.crowding``."""

    def bandwidth(self, group: Group) -> float:
        """Returns the bytes per second in one direction through a ring over ``group``."""
        between = group.inside * self.between.bandwidth if group.nodes > 1 else float("inf")
        if group.inside == 1 and group.nodes > 1:
            # It uses no link inside a node.
            return between
        return min(between, self.inside.bandwidth * (group.inside / self.gpus) ** self.crowding)

    def all_gather(self, group: Group, size: float) -> float:
        """Returns the seconds until every member has all of ``size`` bytes, of which each held an equal part. Each
        member sends (n-1)/n of the bytes in n-1 rounds."""
        if group.size == 1:
            return 0.0
        rounds = (group.inside - 1) * group.nodes * self.inside.latency + (group.nodes - 1) * self.between.latency
        return rounds + size * (group.size - 1) / group.size / self.bandwidth(group)

    def reduce_scatter(self, group: Group, size: float) -> float:
        """Returns the seconds until every member has its part of the sum of ``size`` bytes. Moves what a gather
        moves."""
        return self.all_gather(group, size)

    def all_reduce(self, group: Group, size: float) -> float:
        """Returns the seconds until every member has the sum of ``size`` bytes: a reduce-scatter and a gather. Small
        sums go up and down a tree."""
        if group.size == 1:
            return 0.0
        ring = 2 * self.all_gather(group, size)
        depth = ceil(log2(group.inside)) * self.inside.latency + ceil(log2(group.nodes)) * self.between.latency
        return min(ring, 2 * (depth + size / self.bandwidth(group)))

    def all_to_all(self, group: Group, size: float) -> float:
        """Returns the seconds until every member has sent each one, itself included, an equal part of ``size`` bytes.
        What stays on the node travels beside what leaves it."""
        if group.size == 1:
            return 0.0
        part, latency = size / group.size, self.between.latency if group.nodes > 1 else self.inside.latency
        leaving = part * (group.size - group.inside) / self.between.bandwidth
        return latency + max(leaving, part * (group.inside - 1) / self.inside.bandwidth)

    def message(self, crosses_nodes: bool, size: float) -> float:
        """Returns the seconds of a message of ``size`` bytes, while every GPU of the node sends one."""
        link = self.between if crosses_nodes else self.inside
        return link.latency + size / link.bandwidth


def network_of(cluster: Cluster, gpus: int, efficiency: Efficiency) -> Network:
    """Returns the network of a cluster, of which ``gpus`` GPUs are in use, at the rates that are reached."""
    used = min(gpus, cluster.gpus_per_node)
    share = min(1.0, cluster.cards_per_node / used)
    return Network(
        Link(cluster.inside.bandwidth * efficiency.inside, cluster.inside.latency),
        Link(cluster.between.bandwidth * share * efficiency.between, cluster.between.latency),
        used,
        efficiency.crowding,
    )


def group_of(cluster: Cluster, gpus: int, size: int, stride: int) -> Group:
    """Returns the group of ``size`` ranks that are ``stride`` ranks apart, in a job of so many ``gpus``.

    Neighbouring ranks share a node while it has GPUs left. If groups and nodes do not divide each other, some group has
    few members on one of its nodes, and shares that node's cards with the next group. It counts as if all of its nodes
    had as few.
    """
    per_node = cluster.gpus_per_node
    inside = size if gpus <= per_node else 1 if per_node % stride else gcd(size, per_node // stride)
    return Group(inside, size // inside)


def step_flops(model: Model, tokens: int) -> float:
    """Returns the floating-point operations of a forward and a backward. The backward of a product makes two gradients,
    or one if its matrix is frozen."""
    forward = forward_flops(model, tokens)
    if not model.adapters:
        return 3 * forward
    frozen = model.layers * sum(rows * columns for rows, columns in model.linear_layers)
    return 3 * forward - 2.0 * tokens * frozen - _head_flops(model, tokens)


def forward_flops(model: Model, tokens: int) -> float:
    """Returns the floating-point operations of a forward for so many ``tokens``. Counts attention over whole sequences,
    as MFU usually does (arXiv 2104.04473), though a causal kernel skips half, and windows need less."""
    return sum(count * _layer_flops(kind, tokens) for count, kind in model.kinds) + _head_flops(model, tokens)


def _layer_flops(kind: Model, tokens: int) -> float:
    """Of one layer's forward; of one with experts, if there are layers of two kinds."""
    visited = kind.experts_per_token * (kind.expert_parameters - sum(kind.expert_extras)) + kind.shared_parameters
    active = kind.attention_parameters + visited + kind.router_parameters
    scores = 2.0 * kind.attention_heads * (kind.head_size + kind.value_size) * kind.sequence_length
    adapters = kind.adapters_of(kind.linear_layers) if kind.adapters else 0
    return tokens * (2.0 * (active + adapters) + scores)


def _head_flops(model: Model, tokens: int) -> float:
    return 2.0 * tokens * model.hidden_size * model.vocabulary_size
