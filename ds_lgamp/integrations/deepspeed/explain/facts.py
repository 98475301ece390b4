"""What ``ds_lgamp run --explain`` says, as data. And which node of a cluster file would have which ranks, with what
every kind of link would carry, as data and as text."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from ds_lgamp.config import LgampConfig
from ds_lgamp.cost.assignment import Assignment, Demand, LinkKind
from ds_lgamp.cost.memory import Memory
from ds_lgamp.cost.offload import DiskUse, LiveUse
from ds_lgamp.cost.traffic import Traffic
from ds_lgamp.cost.units import Travel
from ds_lgamp.fields import with_unit
from ds_lgamp.integrations.deepspeed.config.zero import Home
from ds_lgamp.schedule.orders import default_placement
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.view.report import table


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
class SharedFacts:
    """The units of a pipeline rank that equally many data-parallel ranks share, where ranks divide experts."""

    expert_ranks: int
    """How many ranks divide the experts; 1 for what all data-parallel ranks have."""
    sharing_ranks: int
    """How many ranks share each unit."""
    parameters: int
    """Elements on this rank, before they are partitioned."""
    gathers: int
    """In a step."""
    reduces: int
    bytes_sent: int
    """The part of ``collective_bytes_sent`` of these units."""
    memory: Memory
    """As if there were no other units, without activations."""


@dataclass(frozen=True)
class TokenFacts:
    """What takes tokens to the experts of other ranks and back, on a pipeline rank. Bytes are what it sends."""

    layers: int
    """Layers whose experts ranks divide."""
    all_to_alls: int
    """Of a micro-batch."""
    each_token: float
    """Bytes of each token of a micro-batch, if all experts get as many."""
    numbers_of_tokens: int
    """Bytes that say how many tokens follow, of a micro-batch."""
    each_micro_batch: int | None
    """Bytes; None if they are unknown."""
    each_step: int | None


@dataclass(frozen=True)
class RankFacts:
    """What one pipeline rank holds, and does in a step."""

    pipeline_rank: int
    chunks: list[ChunkFacts]
    tied: list[TiedFacts]
    parameters: int
    """Elements of its chunks and tied modules, before they are partitioned."""
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
    """The part of these bytes that hierarchical shards send between nodes; None without such shards, where nodes are
    unknown."""
    memory: Memory
    recomputed: int = 0
    """How many forwards its backwards compute again in a step."""
    recomputed_in_part: int = 0
    """Of how many others layers recompute a part."""
    constants: int = 0
    """Bytes of what dequantises its packed weights; ``memory`` has them among the weights."""
    bus_bytes_loaded: int | None = None
    """Bytes of weights that come from the host; None if nothing waits there, like ``bus_bytes_stored``."""
    bus_bytes_stored: int | None = None
    """Bytes of gradients, and of gathered weights, that go to the host."""
    disk: DiskUse | None = None
    """What lies on a disk and moves there; None if nothing does."""
    live: LiveUse | None = None
    """What live states take in their folder; None without them."""
    hop_bytes: int | None = None
    """Bytes of results that it sends to the next pipeline rank, and of gradients that it gets back. The last rank is
    followed by the first. None if activations are unknown."""
    shared: Sequence[SharedFacts] = ()
    """Its units by how many ranks share them, if it has experts that ranks divide; else empty."""
    tokens: TokenFacts | None = None
    """None without such experts."""


@dataclass(frozen=True)
class Explanation:
    """What a training step would be."""

    spec: ProgramSpec
    """The program of the data-parallel ranks with the most micro-batches."""
    settings: LgampConfig
    data_ranks: int
    tensor_ranks: int
    micro_batch_shares: list[int]
    """Micro-batches of every data-parallel rank."""
    precision: str
    optimizer: str
    layers: int
    parameters: int
    """Elements of the model on each tensor-parallel rank, with all experts; a tied module counts once."""
    bubble: float
    """Idle time as a share of the ideal time, simulated: a backward pass takes twice as long as a forward pass,
    communication takes no time."""
    activations_unknown: str | None
    """Why ``memory`` of the ranks is without the bytes of activations, a clause; None if it has them."""
    ranks: list[RankFacts]
    home_of_frozen: Home = "none"
    """Where frozen weights lie between uses."""
    travel: Travel = Travel()
    """What travels rounded between data-parallel ranks."""
    balance_bytes: tuple[int, int] = (0, 0)
    """What a message of hidden states takes along for the loss that balances experts, and what its gradient does."""

    @property
    def placement(self) -> str:
        """The name of the placement."""
        return self.settings.placement or default_placement(self.settings.schedule)

    @property
    def bubble_formula(self) -> float | None:
        """(P-1)/(N*M), if each of P ranks has N chunks, all with backwards, and M >= P micro-batches go through them
        together, both ways; else None."""
        spec, ranks, micro_batches = self.spec, self.spec.pipeline_ranks, self.spec.micro_batches
        applies = (
            spec.first_trained == 0
            and not spec.returns_outputs
            and spec.chunks % ranks == 0
            and spec.placement == place_chunks("modular", spec.chunks, ranks)
            and spec.micro_batch_group >= micro_batches >= ranks
            and not spec.kept
        )
        return (ranks - 1) / (spec.chunks // ranks * micro_batches) if applies else None

    @property
    def divides_experts(self) -> bool:
        """Whether ranks divide experts."""
        return any(rank.shared for rank in self.ranks)

    @property
    def most_chunks(self) -> int:
        """The most chunks with parameters of any pipeline rank."""
        return max(sum(chunk.parameters > 0 for chunk in facts.chunks) for facts in self.ranks)

    @property
    def micro_batch_outer_gathers(self) -> int | None:
        """2*N*M: gathers per step and rank if every micro-batch went through the whole model before the next. None
        below stage 3, or if chunks have no backward."""
        if self.spec.zero_stage < 3 or self.data_ranks == 1 or self.spec.first_trained:
            return None
        return 2 * self.most_chunks * self.spec.micro_batches

    def as_data(self) -> dict[str, Any]:
        """Returns the facts for a program to read. Facts of the program and of the settings have keys of their own."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        spec, settings = data.pop("spec"), data.pop("settings")
        data |= {name: getattr(spec, name) for name in _OF_PROGRAM}
        data |= {name: getattr(settings, name) for name in _OF_SETTINGS}
        data["travel"] = self.travel._asdict()
        data |= {name: None if (part := getattr(spec, name)) is None else part._asdict() for name in _PARTS_OF_PROGRAM}
        data |= {name: getattr(self, name) for name in ("placement", "bubble_formula", "micro_batch_outer_gathers")}
        data["ranks"] = [_rank_data(rank) for rank in self.ranks]
        return data


_OF_PROGRAM = (
    *("pipeline_ranks", "schedule", "zero_stage", "chunks", "first_trained", "micro_batches", "micro_batch_group"),
    *("returns_outputs", "resident_chunks", "defers_gathers", "updates", "stores_weights"),
)
_PARTS_OF_PROGRAM = ("hierarchy", "offload")
_OF_SETTINGS = ("pipeline_rank_speeds", "data_rank_speeds", "recompute", "recompute_memory")


def _rank_data(rank: RankFacts) -> dict[str, Any]:
    # asdict leaves named tuples as they are, which JSON would write as lists.
    parts = {key: None if (part := getattr(rank, key)) is None else part._asdict() for key in ("disk", "live")}
    return asdict(rank) | parts


class LaidOut(NamedTuple):
    """The chosen order, and why."""

    cluster: str
    islands: Sequence[str]
    demand: Demand
    knows_messages: bool
    """Whether the bytes between pipeline ranks are known. Unknown ones count as none."""
    assignment: Assignment
    others: Sequence[Assignment]
    """In orders that were not chosen."""
    network_seconds: float
    """Of a step on the clock, if compute took no time."""
    step_seconds: float | None
    """Of a step on the clock; None if the time of compute is unknown."""
    exposed_seconds: float | None
    """Of the network that no compute hides."""


def assigned_json(laid_out: LaidOut) -> dict[str, Any]:
    """Returns it for a program to read."""
    assignment = laid_out.assignment
    return {
        "cluster": laid_out.cluster,
        "order": assignment.order,
        "slots": [
            {"rank": rank, "island": laid_out.islands[slot.island], "node": slot.node, "gpu": slot.gpu}
            for rank, slot in enumerate(assignment.slots)
        ],
        "pipeline_speeds": assignment.pipeline_speeds,
        "data_speeds": assignment.data_speeds,
        "data_group_links": assignment.data_group_kinds,
        "hop_links": assignment.hop_kinds,
        "bytes_sent": dict(assignment.bytes_sent),
        "seconds": dict(assignment.seconds),
        "knows_messages": laid_out.knows_messages,
        "network_seconds": laid_out.network_seconds,
        "step_seconds": laid_out.step_seconds,
        "exposed_seconds": laid_out.exposed_seconds,
        "other_orders": [{"order": other.order, "seconds": seconds_of(other)} for other in laid_out.others],
    }


def seconds_of(assignment: Assignment) -> float:
    """Returns the seconds of the messages of a step."""
    return sum(assignment.seconds.values())


_KINDS_OF_LINKS: dict[LinkKind, str] = {
    "node": "inside nodes",
    "island": "inside islands",
    "between": "between islands",
}


def assigned_text(laid_out: LaidOut) -> str:
    """Returns tables and sentences."""
    parts = (_nodes, _groups, _links, _orders)
    return "\n\n".join(part(laid_out) for part in parts)


def _nodes(laid_out: LaidOut) -> str:
    assignment, width = laid_out.assignment, laid_out.demand.data_ranks * laid_out.demand.tensor_ranks
    on_node: dict[tuple[int, str], list[int]] = {}
    for slot, rank in sorted(assignment.rank_of.items(), key=lambda item: (item[0].island, item[1])):
        on_node.setdefault((slot.island, slot.node), []).append(rank)
    rows = [
        [
            laid_out.islands[island],
            node,
            assignment.inside[island].network,
            f"{assignment.gpu_speeds[ranks[0]]:g}",
            _ranges(ranks),
            _ranges(sorted({rank // width for rank in ranks})),
            _ranges(sorted({rank % width // laid_out.demand.tensor_ranks for rank in ranks})),
        ]
        for (island, node), ranks in on_node.items()
    ]
    titles = ["island", "node", "network", "speed", "ranks", "pipeline ranks", "data-parallel ranks"]
    return f"Ranks on {laid_out.cluster}: {assignment.order}\n" + table(titles, rows, left={0, 1, 2, 4, 5, 6})


def _groups(laid_out: LaidOut) -> str:
    assignment = laid_out.assignment
    rows = [
        [rank, f"{speed:g}", _KINDS_OF_LINKS[group], _KINDS_OF_LINKS[hop] if assignment.pipeline_ranks > 1 else "none"]
        for rank, (speed, group, hop) in enumerate(
            zip(assignment.pipeline_speeds, assignment.data_group_kinds, assignment.hop_kinds)
        )
    ]
    return table(["pipeline rank", "speed", "data-parallel groups", "messages to the next"], rows, left={2, 3})


def _links(laid_out: LaidOut) -> str:
    rows = [
        [_KINDS_OF_LINKS[kind], with_unit(round(sent), "B"), f"{laid_out.assignment.seconds[kind]:.3g}"]
        for kind, sent in laid_out.assignment.bytes_sent.items()
    ]
    text = "Each step, all ranks\n" + table(["links", "carry", "busiest, s"], rows, left={0})
    sentences = [f"On the clock, a step takes {laid_out.network_seconds:.3g} s if compute takes no time."]
    if laid_out.exposed_seconds is None:
        sentences.append("How much of it compute hides is unknown: that takes activations and the cluster's peak.")
    else:
        step, bare = laid_out.step_seconds, laid_out.exposed_seconds
        sentences.append(f"With compute it takes {step:.3g} s, of which {bare:.3g} s of the network are exposed.")
    if not laid_out.knows_messages:
        sentences.append("Bytes between pipeline ranks are unknown, because activations are; they count as none.")
    return "\n".join([text, *sentences])


def _orders(laid_out: LaidOut) -> str:
    rows = [[f"{seconds_of(each):.3g}", each.order] for each in (laid_out.assignment, *laid_out.others)]
    return "Orders, and the seconds of their messages in a step; the first one is taken\n" + table(
        ["seconds", "order"], rows, left={1}
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Returns ascending ``numbers`` as a person writes them: 0-3, 8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
