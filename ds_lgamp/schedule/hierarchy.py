"""Hierarchical shards: what ZeRO stage 3 spreads over all data-parallel ranks, and what over the ranks of a node."""

from typing import NamedTuple


class Hierarchy(NamedTuple):
    """How W data-parallel ranks form nodes of h ranks each. Node n has the ranks n h to (n + 1) h - 1.

    Gathers, and the first half of every reduction, stay inside a node. The ranks with the same place in their node are
    **peers**. Peers exchange the rest: 1/h of a chunk.
    """

    node_ranks: int
    """h. It divides W, and is neither 1 nor W."""
    replicated: bool
    """Whether every node has the whole optimizer state (MiCS, arXiv 2205.00119), so that peers update the same shard.
    Otherwise each of the W ranks updates a shard of its own, and peers gather what the others updated once per step
    (ZeRO++ hpZ, arXiv 2306.10209)."""

    def nodes(self, data_ranks: int) -> int:
        """Returns the number of nodes, which is the number of peers."""
        return data_ranks // self.node_ranks
