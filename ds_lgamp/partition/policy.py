"""What a unit of a partition consists of, and how all units are spread over ranks."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import Parameter

from ds_lgamp.cost.units import Travel, aligned
from ds_lgamp.partition.agreement import own_of_disjoint
from ds_lgamp.partition.bus import Bus
from ds_lgamp.partition.host import Host
from ds_lgamp.schedule.spec import STATE_BLOCK, Hierarchy


class UnitParameter(NamedTuple):
    """A parameter of a unit."""

    name: str
    """Its global name, the same in every layout."""
    parameter: Parameter
    group: int | None
    """The optimizer's parameter group; None if the optimizer does not own the parameter."""
    sliced_dimension: int | None = None
    """The dimension along which each tensor-parallel rank has a slice; None if each rank has the whole parameter."""
    partial_gradient: bool = False
    """Whether each tensor-parallel rank computes a part of the gradient, as under sequence parallelism."""
    sharing: dist.ProcessGroup | None = None
    """The data-parallel ranks that have it, if it is an expert's; None if all do."""
    place_among_experts: tuple[int, int] = (0, 1)
    """Which of how many equal slices along the first dimension it is, if other ranks have other experts of it."""
    name_in_model: str | None = None
    """Its name in the model of the script; None if that is the global one."""
    group_of_script: int | None = None
    """The group in which the script holds it, although it may be frozen; None if there is none."""
    in_32_bits: bool = False
    """Whether the optimizer keeps its state in 32 bits, although that of others has 8."""

    @property
    def shown(self) -> str:
        """What sentences call it."""
        return self.name_in_model or self.name

    @property
    def segment_key(self) -> tuple[float, bool, bool]:
        """The same for parameters of one segment. Its order is that of segments in the storage; parameters that the
        optimizer does not own come last."""
        group = float("inf") if self.group is None else self.group
        return group, self.sliced_dimension is not None, self.partial_gradient


class NodeGroups(NamedTuple):
    """The groups of hierarchical shards (:class:`ds_lgamp.schedule.spec.Hierarchy`)."""

    inside: dist.ProcessGroup
    """The data-parallel ranks of this rank's node."""
    peers: dist.ProcessGroup
    """The data-parallel ranks with the same place in their node."""
    replicated: bool
    """Whether peers hold the same shard."""


class ZeroPolicy(NamedTuple):
    """How units are spread over ranks, and how their gradients add up."""

    data_group: dist.ProcessGroup
    """The data-parallel ranks that share every unit."""
    zero_stage: int
    """0 to 3."""
    gradient_dtype: torch.dtype | None = None
    """Gradients accumulate in it over micro-batches; None is the dtype of the parameters."""
    communication_dtype: torch.dtype | None = None
    """Gradients travel in it between data-parallel ranks; None is the dtype in which they accumulate."""
    in_rank_order: bool = False
    """Whether gradients add up in the order of data-parallel ranks at every stage and on every backend."""
    tensor_group: dist.ProcessGroup | None = None
    """The tensor-parallel ranks; None if there is one."""
    nodes: NodeGroups | None = None
    """The groups of hierarchical shards; None without them."""
    host: Host | None = None
    """What the host does for the units, at stages 1 to 3; None if everything stays on the device."""
    expert_tensor_group: dist.ProcessGroup | None = None
    """The tensor-parallel ranks of experts that not all data-parallel ranks have; None if there is one."""
    averaged_ranks: int | None = None
    """Over how many ranks gradients are means; None is the number of data-parallel ranks."""
    frozen_home: Host | Literal["device"] | None = None
    """Where frozen units lie whole between uses: on the host of each rank or on its device; None spreads them as
    others."""
    bus: Bus | None = None
    """What carries gathered weights to the host, where they wait for their next use in the step; None if they are
    gathered again."""
    whole: bool = False
    """Whether every data-parallel rank has all of a unit, whatever the stage."""
    travel: Travel = Travel()
    """What travels rounded; nothing together with ``nodes``."""
    copies_weights: bool = True
    """Whether the optimizer updates fp32 copies of half-precision weights, and not these themselves."""
    state_in_8_bits: bool = False
    """Whether the optimizer has state of 8 bits, of which blocks of a parameter share a scale."""

    @property
    def alignment(self) -> int:
        """Parameters and parts begin at multiples of so many elements."""
        return STATE_BLOCK if self.state_in_8_bits else aligned(1)

    def of_chunk(self, chunk: int) -> "ZeroPolicy":
        """Returns the policy of the units that ``chunk`` alone uses."""
        stays = self.host is not None and chunk in self.host.on_device
        return self._replace(host=None) if stays else self

    def of_tied(self) -> "ZeroPolicy":
        """Returns the policy of the units of tied modules."""
        return self._replace(host=None) if self.host is not None and self.host.on_device else self

    def of_frozen(self) -> "ZeroPolicy":
        """Returns the policy of the frozen units, which never change."""
        # One copy in each node suffices.
        nodes = None if self.nodes is None else self.nodes._replace(replicated=True)
        travel = Travel(weights=self.travel.frozen)
        alone = self._replace(nodes=nodes, state_in_8_bits=False)
        if self.frozen_home is None:
            host = None if self.host is None or not self.host.parameters else self.host
            return alone._replace(host=host, travel=travel)
        home = self.frozen_home
        return alone._replace(host=None if home == "device" else home, whole=True)

    def of_experts(self, sharing: dist.ProcessGroup) -> "ZeroPolicy":
        """Returns the policy of a unit of experts that only the ranks in ``sharing`` have. Each of them has computed
        with the tokens of several ranks, so that gradients are means over all."""
        return self._replace(data_group=sharing, tensor_group=self.expert_tensor_group, averaged_ranks=self.mean_ranks)

    @property
    def mean_ranks(self) -> int:
        """Over how many ranks gradients are means."""
        return self.averaged_ranks or self.data_group.size()

    @property
    def gather_group(self) -> dist.ProcessGroup:
        """The ranks that gather parameters, and that scatter gradients, among each other."""
        return self.data_group if self.nodes is None else self.nodes.inside

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks whose shards are all of a unit, if it is partitioned."""
        return self.nodes.inside if self.nodes is not None and self.nodes.replicated else self.data_group

    @property
    def shard_index(self) -> int:
        """Which of the equal parts of a unit is this rank's shard, if it is partitioned."""
        return self.shard_order.index(self.shard_group.rank())

    @property
    def shard_order(self) -> list[int]:
        """The ranks of :attr:`shard_group` in the order of their shards. Nodes have consecutive data-parallel ranks;
        shards of peers follow one another, so that they are one part of the unit together."""
        nodes, ranks = self.nodes, range(self.shard_group.size())
        if nodes is None or nodes.replicated:
            return list(ranks)
        size = nodes.inside.size()
        return sorted(ranks, key=lambda rank: (rank % size, rank // size))

    @property
    def copies(self) -> tuple[int, int]:
        """Which copy of its shard this rank holds, and how many data-parallel ranks hold one."""
        if not self.partitioned:
            return self.data_group.rank(), self.data_group.size()
        if self.nodes is not None and self.nodes.replicated:
            return self.nodes.peers.rank(), self.nodes.peers.size()
        return 0, 1

    @property
    def partitioned(self) -> bool:
        """Whether each data-parallel rank updates a part of a unit, not all of it."""
        return self.zero_stage > 0 and self.data_group.size() > 1 and not self.whole

    @property
    def bits_of_weights(self) -> int | None:
        """In how many bits a gather moves an element for the compute; None as it is."""
        return self.travel.weights if self.partitioned and self.zero_stage == 3 else None

    @property
    def is_first_tensor_rank(self) -> bool:
        """Whether this rank speaks for parameters that are the same on all tensor-parallel ranks."""
        return self.tensor_group is None or self.tensor_group.rank() == 0


def node_groups(hierarchy: Hierarchy, data_ranks: Sequence[Sequence[int]]) -> NodeGroups:
    """Makes this rank's two groups. Collective over all ranks.

    Args:
        data_ranks: the global ranks of every data-parallel group, in their order.
    """
    size = hierarchy.node_ranks
    inside = [list(ranks[first : first + size]) for ranks in data_ranks for first in range(0, len(ranks), size)]
    peers = [list(ranks[place::size]) for ranks in data_ranks for place in range(size)]
    own, own_peers = own_of_disjoint(inside), own_of_disjoint(peers)
    assert own is not None and own_peers is not None, "every rank is in one group of each kind"
    return NodeGroups(own, own_peers, hierarchy.replicated)
