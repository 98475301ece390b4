"""How long the actions of a program take.

:class:`Durations` has one number for all chunks, links and ranks, :class:`Costs` one for each of them. The clock reads
:class:`Costs`. A collective on several networks and a tensor-parallel chunk are durations here: callers that know
networks and GPUs compute them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

from ds_lgamp.schedule.spec import ProgramSpec

Link = tuple[int, int]
"""The pipeline rank that sends and the one that receives."""


class Durations(NamedTuple):
    """How long each thing takes, in one unit of time. All chunks, links and ranks are alike."""

    forward: float = 1.0
    """One chunk's forward for one micro-batch."""
    backward: float = 2.0
    """One chunk's backward for one micro-batch, without recomputation."""
    hop: float = 0.0
    """The way of a message to the next rank: its latency and its transfer."""
    gather: float = 0.0
    """The gather of one chunk, with the tied modules that move with it."""
    reduce: float = 0.0
    """The reduction of one chunk over its data-parallel ranks, with the tied modules that move with it."""
    message: float = 0.0
    """How long one message keeps the sender's link busy: its transfer."""
    recompute: float = 0.0
    """Added to the backward of a chunk that is recomputed."""
    update: float = 0.0
    """The optimizer's update of one chunk, with the tied modules that move with it."""
    refresh: float = 0.0
    """The gather of one chunk between nodes, with hierarchical shards."""
    combine: float = 0.0
    """The sum of one chunk between nodes, with hierarchical shards."""
    load: float = 0.0
    """The copy of this rank's part of one chunk's weights from host to device, with offloading."""
    store: float = 0.0
    """The copy of this rank's part of one chunk's gradient from device to host, with offloading."""
    input: float = 0.0
    """The copy of one chunk's input for one micro-batch, in either direction, if the host holds inputs."""
    weights: float = 0.0
    """The copy of all weights of one chunk, in either direction, if gathered weights wait on the host."""
    exchange: float = 0.0
    """The part of ``forward`` in which tokens travel among ranks that divide experts."""
    exchanges: float = 0.0
    """In how many all-to-alls they do."""
    weights_backward: float | None = None
    """The part of ``backward`` that may run later, if backwards have two parts; None if half of it."""


UNIT_DURATIONS = Durations()


class DiskSeconds(NamedTuple):
    """How long a disk takes to move what belongs to one chunk. It reads and writes at once."""

    loaded: float = 0.0
    """What a load reads."""
    stored: float = 0.0
    """What a store writes."""
    read: float = 0.0
    """What an update reads."""
    written: float = 0.0
    """What an update writes."""


@dataclass(frozen=True)
class Costs:
    """How long each thing takes, in one unit of time. :func:`uniform_costs` makes it from :class:`Durations`, and
    ``dataclasses.replace`` changes what is uneven."""

    forward: Sequence[float]
    """By chunk, for one micro-batch."""
    backward: Sequence[float]
    """By chunk, for one micro-batch, without recomputation."""
    recompute: Sequence[float]
    """By chunk. Added to its backward if that is recomputed."""
    gather: Sequence[float]
    """By chunk, with the tied modules that move with it."""
    reduce: Sequence[float]
    """By chunk, with the tied modules that move with it."""
    hop: Mapping[Link, float]
    """By link: the way of a message, latency and transfer. The two directions between two ranks are two links."""
    message: Mapping[Link, float]
    """By link: how long a message keeps the sender busy, which is its transfer. A rank's messages leave one after
    another, whichever links they take."""
    update: Sequence[float]
    """By chunk: the optimizer's update, with the tied modules that move with it."""
    tied: Sequence[float]
    """By rank: the sum of the copies of tied modules over the pipeline ranks that hold one, at STEP before the update.
    It begins when the last of them is there. 0 for a rank without copies."""
    shares_card: bool = False
    """Whether a rank's messages and collectives share the bandwidth of one network card
    (:class:`ds_lgamp.schedule.card.SharedCard`). Otherwise each has its own."""
    refresh: Sequence[float] = ()
    """By chunk, as ``combine``: with hierarchical shards, what travels between nodes."""
    combine: Sequence[float] = ()
    load: Sequence[float] = ()
    """By chunk, as ``store``: with offloading, what travels between host and device."""
    store: Sequence[float] = ()
    input: Sequence[float] = ()
    """By chunk: its input for one micro-batch, between device and host."""
    weights: Sequence[float] = ()
    """By chunk: all its weights, between device and host."""
    disk: Sequence[DiskSeconds] = ()
    """By chunk: what lies on a disk; empty if nothing does."""
    exchange: Sequence[float] = ()
    """By chunk, as ``exchanges``: the part of its forward in which tokens travel among ranks that divide experts, and
    in how many all-to-alls. Empty if nobody knows: then a program whose exchanges overlap hides none."""
    exchanges: Sequence[float] = ()
    weights_backward: Sequence[float] = ()
    """By chunk: the part of its backward that may run later, if backwards have two parts; half of it if this is
    empty."""

    def parts_of_backward(self, spec: ProgramSpec) -> tuple[list[float], list[float]]:
        """Returns how long the first and the second part of each chunk's backward take."""
        halves = self.weights_backward or [cost / 2 for cost in self.backward]
        second = [cost if chunk in spec.split_chunks else 0.0 for chunk, cost in enumerate(halves)]
        return [whole - later for whole, later in zip(self.backward, second)], second

    def without(self, *names: str) -> "Costs":
        """Returns the same costs, with 0 for everything among ``names``; itself if that is so already."""
        zeros: dict[str, Any] = {}
        for name in names:
            times = getattr(self, name)
            if name == "disk":
                zeros.update({name: ()} if times else {})
                continue
            by_link = isinstance(times, Mapping)
            if any(times.values() if by_link else times):
                zeros[name] = dict.fromkeys(times, 0.0) if by_link else [0.0] * len(times)
        return replace(self, **zeros) if zeros else self

    def check(self, spec: ProgramSpec) -> None:
        """Raises ValueError if a cost is missing, negative or not finite, or if there are too many."""
        for name, chunks in _by_chunk(spec).items():
            if getattr(self, name) or name not in ("exchange", "exchanges"):
                _check_count(name, getattr(self, name), chunks, "chunk")
        for part, whole in zip(self.exchange, self.forward):
            if part > whole:
                raise ValueError(f"exchange is {part}; it is a part of the forward, which takes {whole}")
        for name, of_chunks in zip(DiskSeconds._fields, zip(*self.disk)):
            _check_count(f"disk ({name})", of_chunks, spec.chunks, "chunk")
        _check_count("tied", self.tied, spec.pipeline_ranks, "pipeline rank")
        if self.weights_backward:
            _check_count("weights_backward", self.weights_backward, spec.chunks, "chunk")
            for later, whole in zip(self.weights_backward, self.backward):
                if later > whole:
                    raise ValueError(f"weights_backward is {later}; it is a part of the backward, which takes {whole}")
        for name in ("hop", "message"):
            times: Mapping[Link, float] = getattr(self, name)
            for source, target in links_of(spec) - times.keys():
                raise ValueError(f"{name} has no cost of the link from rank {source} to rank {target}; add it")
            _check_times(name, times.values())


def overlapped(forward: float, exchange: float, exchanges: float) -> tuple[float, float]:
    """Returns how long two forwards take that compute beside each other's exchanges: up to the end of the first one,
    and from then on.

    Exchanges cut a forward into equally long computes, which alternate. Beside each exchange the other forward
    computes, so what lasts longer counts. Only the first and the last compute have nothing beside them.

    Args:
        forward: of one alone.
        exchange: the part of it in which tokens travel, in so many ``exchanges``.
    """
    if not exchanges:
        return forward, forward
    compute = (forward - exchange) / (exchanges + 1)
    longer = max(compute, exchange / exchanges)
    return 2 * compute + (2 * exchanges - 1) * longer, longer


def uniform_costs(spec: ProgramSpec, durations: Durations) -> Costs:
    """Returns the costs of a program whose chunks, links and ranks are alike."""
    links = links_of(spec)
    by_chunk: dict[str, Any] = {name: (getattr(durations, name),) * chunks for name, chunks in _by_chunk(spec).items()}
    return Costs(
        **by_chunk,
        hop=dict.fromkeys(links, durations.hop),
        message=dict.fromkeys(links, durations.message),
        tied=(0.0,) * spec.pipeline_ranks,
        weights_backward=() if durations.weights_backward is None else (durations.weights_backward,) * spec.chunks,
    )


def _by_chunk(spec: ProgramSpec) -> dict[str, int]:
    """Returns how many chunks there are for each kind of cost; none for what the program does not do."""
    chunks = spec.chunks
    return {
        **dict.fromkeys(("forward", "backward", "recompute", "gather", "reduce", "update"), chunks),
        **dict.fromkeys(("exchange", "exchanges"), chunks),
        **dict.fromkeys(("refresh", "combine"), chunks if spec.hierarchy else 0),
        **dict.fromkeys(("load", "store"), chunks if spec.offload else 0),
        "input": chunks if spec.stores_inputs else 0,
        "weights": chunks if spec.stores_weights else 0,
    }


def sized_costs(spec: ProgramSpec, of_layer: Durations, layers: Sequence[float], speeds: Sequence[float] = ()) -> Costs:
    """Returns the costs of a program whose chunks have unequal numbers of layers, on ranks of different speeds.

    Args:
        of_layer: durations of one layer on a rank of speed 1. Messages and updates do not depend on either.
        layers: of every chunk.
        speeds: the relative speed of each rank; empty if all are alike.
    """
    speeds = speeds or (1.0,) * spec.pipeline_ranks
    slowness = [count / speeds[rank] for count, rank in zip(layers, spec.placement)]
    return replace(
        uniform_costs(spec, of_layer),
        forward=[of_layer.forward * slow for slow in slowness],
        backward=[of_layer.backward * slow for slow in slowness],
        recompute=[of_layer.recompute * slow for slow in slowness],
        exchange=[of_layer.exchange * slow for slow in slowness],
        exchanges=[of_layer.exchanges * count for count in layers],
        weights_backward=[(of_layer.weights_backward or 0.0) * slow for slow in slowness if of_layer.weights_backward],
        gather=[of_layer.gather * count for count in layers],
        reduce=[of_layer.reduce * count for count in layers],
    )


def links_of(spec: ProgramSpec) -> set[Link]:
    """Returns the links between neighbouring chunks, in both directions."""
    there = {(source, target) for source, target in zip(spec.placement, spec.placement[1:]) if source != target}
    return there | {(target, source) for source, target in there}


def _check_count(name: str, times: Sequence[float], count: int, each: str) -> None:
    if len(times) != count:
        raise ValueError(f"{name} has {len(times)} costs; give one for each {each}, {count} in all")
    _check_times(name, times)


def _check_times(name: str, times: Collection[float]) -> None:
    for time in times:
        if not 0 <= time < inf:
            raise ValueError(f"{name} is {time}; a cost is finite and not negative")
