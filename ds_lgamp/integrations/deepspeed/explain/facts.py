"""What ``ds_lgamp run --explain`` says, as data."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from ds_lgamp.cost.disk import DiskUse, LiveUse
from ds_lgamp.cost.memory import Memory
from ds_lgamp.cost.traffic import Traffic


@dataclass(frozen=True)
class ChunkFacts:
    """A chunk and the layers it is made of."""

    chunk: int
    first_layer: int
    last_layer: int
    layer_types: list[str]
    parameters: int
    """Its own, without those of tied modules."""
    forward_flops: int | None = None
    """Floating-point operations of its forward for one micro-batch; None if activations are unknown."""


@dataclass(frozen=True)
class TiedFacts:
    """A tied module on a pipeline rank."""

    key: str
    layer_type: str
    parameters: int
    chunks: list[int]
    """The rank's chunks that use it."""
    pipeline_ranks: list[int]
    """The ranks that hold a copy."""


@dataclass(frozen=True)
class RankFacts:
    """What one pipeline rank holds, and does in a step."""

    pipeline_rank: int
    chunks: list[ChunkFacts]
    tied: list[TiedFacts]
    parameters: int
    """Those of its chunks and tied modules, before they are partitioned."""
    traffic: Traffic
    tied_sums: int
    """How many tied modules have copies on other pipeline ranks, whose gradients the step gathers and adds up."""
    collective_bytes_sent: int
    """Bytes that gathers, reductions and tied sums send, each in the usual algorithm."""
    update_collectives: int
    """Collectives of the optimizer's step, of LAMB or Muon."""
    update_bytes_sent: int
    """Bytes that they send, on the data-parallel rank that sends most."""
    bytes_between_nodes: int | None
    """Those of them that hierarchical shards send between nodes; None without such shards, where nodes are unknown."""
    memory: Memory
    bus_bytes_loaded: int | None = None
    """Bytes of weights that come from the host; None without offloading, like ``bus_bytes_stored``."""
    bus_bytes_stored: int | None = None
    """Bytes of gradients that go to the host."""
    disk: DiskUse | None = None
    """What lies on a disk and moves there; None if nothing does."""
    live: LiveUse | None = None
    """What live states take in their folder; None without them."""
    hop_bytes: int | None = None
    """Bytes of results that it sends to the next pipeline rank, and of gradients that it gets back. The last rank is
    followed by the first. None if activations are unknown."""


@dataclass(frozen=True)
class Explanation:
    """What a training step would be."""

    pipeline_ranks: int
    data_ranks: int
    tensor_ranks: int
    schedule: str
    placement: str
    zero_stage: int
    hierarchy: dict[str, Any] | None
    """The fields of :class:`ds_lgamp.schedule.hierarchy.Hierarchy`; None without hierarchical shards."""
    offload: dict[str, Any] | None
    """The fields of :class:`ds_lgamp.schedule.offload.Offload`; None if everything stays on the device."""
    chunks: int
    first_trained: int
    """The first chunk with a backward: all below it are frozen."""
    micro_batches: int
    """The most of any data-parallel rank."""
    micro_batch_group: int
    returns_outputs: bool
    """Whether the script computes the loss: it then gets outputs call by call, and backwards follow the last."""
    resident_chunks: int
    defers_gathers: bool
    """Whether what a step updated is gathered during the next step."""
    pipeline_rank_speeds: list[float] | None
    data_rank_speeds: list[float] | None
    micro_batch_shares: list[int]
    """Micro-batches of every data-parallel rank."""
    recompute: str
    precision: str
    optimizer: str
    updates: str
    """When the optimizer updates a chunk: one of ``schedule.spec.UPDATES``."""
    layers: int
    parameters: int
    """Those of the model, on each tensor-parallel rank; a tied module counts once."""
    bubble: float
    """Idle time as a share of the ideal time, simulated: a backward pass takes twice as long as a forward pass,
    communication takes no time."""
    bubble_formula: float | None
    """(P-1)/(N*M), if each of P ranks has N chunks, all with backwards, and M >= P micro-batches go through them
    together, both ways; else None."""
    micro_batch_outer_gathers: int | None
    """2*N*M: gathers per step and rank if every micro-batch went through the whole model before the next. None below
    stage 3, or if chunks have no backward."""
    activations_unknown: str | None
    """Why ``memory`` of the ranks is without the bytes of activations, a clause; None if it has them."""
    ranks: list[RankFacts]


def json_text(facts: Explanation, assignment: dict[str, Any] | None = None) -> str:
    """Returns the facts for a program to read, with what is known of the ``assignment`` of ranks to nodes."""
    written = asdict(facts)
    for rank in written["ranks"]:
        for key in ("disk", "live"):
            rank[key] = None if rank[key] is None else rank[key]._asdict()
    return json.dumps(written | ({} if assignment is None else {"assignment": assignment}))
