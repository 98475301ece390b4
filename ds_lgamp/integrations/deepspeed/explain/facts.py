"""What ``ds_lgamp run --explain`` says, as data."""

import json
from dataclasses import asdict, dataclass

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
    memory: Memory


@dataclass(frozen=True)
class Explanation:
    """What a training step would be."""

    pipeline_ranks: int
    data_ranks: int
    schedule: str
    placement: str
    zero_stage: int
    chunks: int
    micro_batches: int
    micro_batch_group: int
    resident_chunks: int
    recompute: str
    precision: str
    optimizer: str
    layers: int
    parameters: int
    """Those of the model; a tied module counts once."""
    bubble: float
    """Idle time as a share of the ideal time, simulated: a backward pass takes twice as long as a forward pass,
    communication takes no time."""
    bubble_formula: float | None
    """(P-1)/(N*M), if each of P ranks has N chunks and M >= P micro-batches go through them together; else None."""
    micro_batch_outer_gathers: int | None
    """2*N*M: gathers per step and rank if every micro-batch went through the whole model before the next. None below
    stage 3."""
    activations_unknown: str | None
    """Why ``memory`` of the ranks is without the bytes of activations, a clause; None if it has them."""
    ranks: list[RankFacts]


def json_text(facts: Explanation) -> str:
    """Returns the facts for a program to read."""
    return json.dumps(asdict(facts))
