"""Which rank each GPU of a cluster with islands has, and the speeds, links and bytes that follow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from ds_lgamp.schedule.spec import Hierarchy

LinkKind = Literal["node", "island", "between"]
"""What joins two GPUs: their node, the fast network of their island, or the network between islands."""
LINK_KINDS: tuple[LinkKind, ...] = ("node", "island", "between")
"""From the fastest to the slowest."""


class Slot(NamedTuple):
    """A place for a rank: one GPU of the cluster."""

    island: int
    """Number of the island in the cluster file."""
    node: str
    gpu: int
    """Its number on the node, as ``LOCAL_RANK``."""


class Transport(NamedTuple):
    """How messages travel over a network."""

    network: str
    """infiniband, roce or ethernet."""
    interface: str | None = None
    """The network interface, such as eth0; None leaves it to the backend."""
    nccl_network: str | None = None
    """What NCCL calls the network: IB, Socket or the name of a plugin; None leaves it to NCCL."""


class DataGroup(NamedTuple):
    """Data-parallel ranks that communicate with one another."""

    members: Sequence[int]
    size: float
    """Bytes that each of them sends in a step."""


@dataclass(frozen=True)
class Demand:
    """What a step of P pipeline x W data-parallel x T tensor-parallel ranks sends. :mod:`ds_lgamp.cost.traffic` counts
    it."""

    pipeline_ranks: int
    data_ranks: int
    tensor_ranks: int
    data_bytes: tuple[float, ...]
    """By pipeline rank: bytes that each of its ranks sends over its data-parallel group."""
    hop_bytes: tuple[float, ...]
    """By pipeline rank: bytes of results that each of its ranks sends to the next pipeline rank, and of gradients that
    it gets back. The last rank is followed by the first."""
    compute: float = 0.0
    """Seconds that a GPU of speed 1 computes in a step, if all have as much work; 0 if unknown."""
    hierarchy: Hierarchy | None = None
    """Hierarchical shards; None if all data-parallel ranks are alike."""
    peer_bytes: tuple[float, ...] = ()
    """With hierarchical shards, by pipeline rank: those of ``data_bytes`` that each of its ranks sends to its peers."""
    micro_batch_shares: tuple[int, ...] = ()
    """By data-parallel rank: its micro-batches, of which ``hop_bytes`` count the most; empty if all have as many."""
    order: str = ""
    """The :attr:`Assignment.order` that a plan has chosen for the step; "" leaves it to the costs."""

    @property
    def ranks(self) -> int:
        return self.pipeline_ranks * self.data_ranks * self.tensor_ranks

    def hop_share(self, data_rank: int) -> float:
        """Returns which part of ``hop_bytes`` the pipeline of a data-parallel rank sends."""
        shares = self.micro_batch_shares
        return shares[data_rank] / max(shares) if shares else 1.0

    def near_groups(self, pipeline_rank: int) -> list[DataGroup]:
        """Returns the groups that gather and reduce: all data-parallel ranks, or those of each node of a hierarchy."""
        members, size = range(self.data_ranks), self.data_bytes[pipeline_rank]
        if self.hierarchy is None:
            return [DataGroup(members, size)]
        width, near = self.hierarchy.node_ranks, size - self.peer_bytes[pipeline_rank]
        return [DataGroup(members[first : first + width], near) for first in range(0, self.data_ranks, width)]

    def peer_groups(self, pipeline_rank: int) -> list[DataGroup]:
        """Returns the groups of peers; none without a hierarchy."""
        if self.hierarchy is None:
            return []
        width, members = self.hierarchy.node_ranks, range(self.data_ranks)
        return [DataGroup(members[place::width], self.peer_bytes[pipeline_rank]) for place in range(width)]


@dataclass(frozen=True)
class Assignment:
    """Ranks of P pipeline x W data-parallel x T tensor-parallel ranks.

    Rank (p*W + d)*T + t is the one at pipeline rank p, data-parallel rank d and tensor rank t, as in DeepSpeed's
    topology (pipe, data, model) and in Megatron's order (tp, dp, pp).
    """

    pipeline_ranks: int
    data_ranks: int
    tensor_ranks: int
    slots: tuple[Slot, ...]
    """The place of every rank."""
    gpu_speeds: tuple[float, ...]
    """The relative speed of every rank's GPU."""
    inside: tuple[Transport, ...]
    """By island: the network between its nodes."""
    outside: tuple[Transport, ...]
    """By island: the network to other islands, through the interface that its nodes have there."""
    order: str
    """A clause that says how the ranks are laid out."""
    bytes_sent: Mapping[LinkKind, int]
    """Bytes that all ranks send in a step, by kind of link."""
    seconds: Mapping[LinkKind, float]
    """Seconds for which the busiest link of each kind sends them."""

    @property
    def ranks(self) -> int:
        return len(self.slots)

    @cached_property
    def rank_of(self) -> Mapping[Slot, int]:
        """The rank at every place."""
        return {slot: rank for rank, slot in enumerate(self.slots)}

    def rank(self, pipeline_rank: int, data_rank: int, tensor_rank: int = 0) -> int:
        return (pipeline_rank * self.data_ranks + data_rank) * self.tensor_ranks + tensor_rank

    def data_group(self, pipeline_rank: int, tensor_rank: int = 0) -> list[int]:
        """Returns the ranks that hold the same parameters, by data-parallel rank."""
        return [self.rank(pipeline_rank, data_rank, tensor_rank) for data_rank in range(self.data_ranks)]

    def pipeline(self, data_rank: int, tensor_rank: int = 0) -> list[int]:
        """Returns the ranks of a pipeline, in its order."""
        return [self.rank(pipeline_rank, data_rank, tensor_rank) for pipeline_rank in range(self.pipeline_ranks)]

    @property
    def pipeline_speeds(self) -> tuple[float, ...]:
        """The relative speed of every pipeline rank: that of its slowest GPU, because the others wait for it."""
        width = self.data_ranks * self.tensor_ranks
        return tuple(min(self.gpu_speeds[first : first + width]) for first in range(0, self.ranks, width))

    @property
    def data_speeds(self) -> tuple[float, ...]:
        """The relative speed of every data-parallel rank: that of the slowest GPU in its pipelines."""
        return tuple(
            min(
                self.gpu_speeds[rank]
                for tensor_rank in range(self.tensor_ranks)
                for rank in self.pipeline(data, tensor_rank)
            )
            for data in range(self.data_ranks)
        )

    def kind(self, ranks: Sequence[int]) -> LinkKind:
        """Returns the slowest kind of link between ``ranks``."""
        slots = [self.slots[rank] for rank in ranks]
        if len({slot.island for slot in slots}) > 1:
            return "between"
        return "island" if len({slot.node for slot in slots}) > 1 else "node"

    def ranks_of(self, pipeline_rank: int, tensor_rank: int, group: DataGroup) -> list[int]:
        """Returns the ranks of ``group``, in the order of its members."""
        return [self.rank(pipeline_rank, data_rank, tensor_rank) for data_rank in group.members]

    @property
    def data_group_kinds(self) -> tuple[LinkKind, ...]:
        """For every pipeline rank, the slowest kind of link in its data-parallel groups."""
        return tuple(
            self._slowest([self.data_group(pipeline_rank, tensor_rank) for tensor_rank in range(self.tensor_ranks)])
            for pipeline_rank in range(self.pipeline_ranks)
        )

    @property
    def hop_kinds(self) -> tuple[LinkKind, ...]:
        """For every pipeline rank, the slowest kind of link to the next one; the last one is followed by the first."""
        return tuple(
            self._slowest(
                [
                    [pipeline[rank], pipeline[(rank + 1) % self.pipeline_ranks]]
                    for data_rank in range(self.data_ranks)
                    for tensor_rank in range(self.tensor_ranks)
                    for pipeline in [self.pipeline(data_rank, tensor_rank)]
                ]
            )
            for rank in range(self.pipeline_ranks)
        )

    def _slowest(self, groups: Sequence[Sequence[int]]) -> LinkKind:
        return max((self.kind(ranks) for ranks in groups), key=LINK_KINDS.index)

    def transport(self, ranks: Sequence[int]) -> Transport | None:
        """Returns how the first of ``ranks`` communicates with the others: by the network of its island, else by the
        one between islands; None within a node."""
        kind, island = self.kind(ranks), self.slots[ranks[0]].island
        if kind == "node":
            return None
        return self.outside[island] if kind == "between" else self.inside[island]
