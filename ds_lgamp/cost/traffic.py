"""Predicts the collectives and messages of one step by reading a rank's program."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_lgamp.cost.activations import ActivationBytes
from ds_lgamp.cost.units import ElementBytes, Sharding, UnitSize, stays
from ds_lgamp.schedule.actions import PARTITION, RECEIVES, SENDS, Action, Kind
from ds_lgamp.schedule.placement import Placement
from ds_lgamp.schedule.spec import FP8_BLOCK, LEAST_ROUNDED, ActivationType, Offload


@dataclass
class Traffic:
    """Counts of one step on one rank, with two or more data-parallel ranks. With one, only messages remain."""

    gathers: int = 0
    """Gathers of chunks."""
    reduces: int = 0
    """Reductions of chunks."""
    sends: int = 0
    """Messages, one per micro-batch and result: activations and gradients."""
    receives: int = 0
    tied_gathers: int = 0
    tied_reduces: int = 0
    frozen_gathers: int = 0
    """Gathers of frozen parameters that ranks share, at stage 3 only. Trainable parameters of the same chunk or tied
    module are gathered separately."""
    refreshes: int = 0
    """Gathers between nodes, of chunks and tied modules; with hierarchical shards only, like ``combines``."""
    combines: int = 0
    """Sums between nodes, of chunks and tied modules."""
    expert_gathers: int = 0
    """Gathers of experts that ranks divide, beside those of the rest of their chunk."""
    expert_reduces: int = 0


def predict_traffic(
    actions: Sequence[Action],
    zero_stage: int,
    chunks: Collection[int],
    tied_users: Sequence[Collection[int]],
    frozen_users: Sequence[Collection[int]] = (),
    expert_users: Sequence[Collection[int]] = (),
) -> Traffic:
    """Counts the traffic of a rank's program.

    Args:
        chunks: the chunks of the rank that have trainable parameters of their own.
        tied_users: for each trainable tied module on the rank, the chunks of the rank that use it. The module is
            gathered with the first user that needs it and reduced after the last.
        frozen_users: for each chunk and tied module with frozen parameters, the chunks of the rank that use them.
            Frozen parameters never change, so they are gathered at stage 3 only and never reduced. Those that ranks
            keep whole are not gathered either, and do not belong here.
        expert_users: for each unit of trainable experts that ranks divide, the chunks of the rank that use it. Experts
            that nobody else has move nothing, and are not among them.
    """
    moves = [action for action in actions if action.kind in PARTITION]
    own = [_moves_of(moves, [chunk], zero_stage) for chunk in chunks]
    tied = [_moves_of(moves, users, zero_stage) for users in tied_users]
    frozen = [_moves_of(moves, users, zero_stage, frozen=True) for users in frozen_users if zero_stage == 3]
    experts = [_moves_of(moves, users, zero_stage) for users in expert_users]
    trained, combines = [*own, *tied], any(action.kind is Kind.COMBINE for action in moves)
    return Traffic(
        gathers=sum(unit.gathers for unit in own),
        reduces=sum(unit.reduces for unit in own),
        sends=sum(action.kind in SENDS for action in actions),
        receives=sum(action.kind in RECEIVES for action in actions),
        tied_gathers=sum(unit.gathers for unit in tied),
        tied_reduces=sum(unit.reduces for unit in tied),
        frozen_gathers=sum(unit.gathers for unit in frozen),
        refreshes=sum(unit.refreshes for unit in trained),
        combines=sum(unit.reduces for unit in trained) if combines else 0,
        expert_gathers=sum(unit.gathers for unit in experts),
        expert_reduces=sum(unit.reduces for unit in experts),
    )


class _Moves(NamedTuple):
    """How often a step moves one unit."""

    gathers: int
    reduces: int
    refreshes: int
    loads: int
    """How often its weights come back from the copy on the host."""
    stores: int
    """How often they go there."""


def _moves_of(actions: Sequence[Action], users: Collection[int], zero_stage: int, frozen: bool = False) -> _Moves:
    """Counts the moves of a unit that the chunks ``users`` of the rank share.

    It is gathered whenever a user needs it and no user holds it, below stage 3 once per step; refreshed and stored with
    its first user; and reduced after its last one. Once stored, it is loaded instead of gathered, until the step
    changes it; a ``frozen`` one was stored in an earlier step.
    """
    gathers = reduces = refreshes = loads = stores = 0
    is_stored = frozen and any(action.kind is Kind.STORE_WEIGHTS and action.chunk in users for action in actions)
    holders: set[int] = set()
    reduced: set[int] = set()
    for action in actions:
        if action.chunk not in users:
            continue
        if action.kind in (Kind.GATHER, Kind.LOAD_WEIGHTS):
            if is_stored:
                loads += not holders
            else:
                gathers += not holders and (zero_stage == 3 or gathers == 0)
            holders.add(action.chunk)
        elif action.kind is Kind.RELEASE:
            holders.discard(action.chunk)
        elif action.kind is Kind.REFRESH:
            refreshes = 1
        elif action.kind is Kind.STORE_WEIGHTS:
            stores += not is_stored
            is_stored = True
        elif action.kind is Kind.REDUCE:
            reduced.add(action.chunk)
            if len(reduced) == len(users):
                reduces += 1
                reduced.clear()
    return _Moves(gathers, reduces, refreshes, loads, stores)


def collective_bytes(
    actions: Sequence[Action],
    unit: UnitSize,
    sharding: Sharding,
    size: ElementBytes,
) -> int:
    """Returns the bytes a rank sends for one unit in a step, counted as ``CollectiveCounter`` counts them.

    With W ranks that have the unit:

    - A gather sends W-1 parts.
    - A reduce-scatter sends (W-1)/W of the gradient.
    - An all-reduce sends 2(W-1)/W of the gradient. In rank order, an all-to-all and a gather replace it and send as
      much.
    - The sum of T copies of a tied unit sends T-1 parts.

    What travels rounded has the bytes of ``size.gathered`` and ``size.reduced``.

    With hierarchical shards over nodes of h ranks, h takes the place of W, and :func:`bytes_between_nodes` come on top.
    """
    shared = unit.shared(sharding)
    zero_stage, ranks = shared.zero_stage, shared.data_ranks
    moves, part = _moves_of(actions, unit.chunks, zero_stage, unit.frozen), unit.part(sharding)
    others = unit.kept(sharding._replace(zero_stage=3)) * (shared.sharers - 1)
    if zero_stage == 0:
        reduce = 2 * size.travelling * part * (ranks - 1) // ranks
    else:
        reduce = size.reduced(others)
    # Frozen parameters never change.
    gathers = 0 if unit.whole_on is not None or (unit.frozen and zero_stage < 3) else moves.gathers
    return (
        gathers * size.gathered(unit, others, zero_stage)
        + (0 if unit.frozen else moves.reduces) * reduce
        + (unit.copies - 1) * size.sums * part
        + bytes_between_nodes(actions, unit, sharding, size)
    )


def bytes_between_nodes(actions: Sequence[Action], unit: UnitSize, sharding: Sharding, size: ElementBytes) -> int:
    """Returns the bytes a rank sends to other nodes for one unit in a step: 0 without hierarchical shards.

    With R nodes:

    - A refresh sends R-1 parts.
    - What combines the sums of nodes sends R-1 parts, or 2(R-1)/R of what a rank keeps if nodes are replicas.
    """
    hierarchy = sharding.hierarchy
    if hierarchy is None or unit.frozen:
        return 0
    moves, part, nodes = _moves_of(actions, unit.chunks, 3), unit.part(sharding), hierarchy.nodes(sharding.data_ranks)
    combine = 2 * part * (nodes - 1) // nodes if hierarchy.replicated else part * (nodes - 1)
    return moves.refreshes * size.weights * part * (nodes - 1) + moves.reduces * size.travelling * combine


class BusBytes(NamedTuple):
    """Bytes of a step over the bus between a rank's device and its host."""

    loaded: int = 0
    stored: int = 0


def bus_bytes(
    actions: Sequence[Action],
    units: Sequence[UnitSize],
    offload: Offload | None,
    sharding: Sharding,
    size: ElementBytes,
) -> BusBytes:
    """Returns what a rank loads and stores in a step of its program ``actions``, with parts of m elements:

    - loads: w m for each gather of a unit if the host holds the parameters. Otherwise w m once, without frozen units.
      A frozen unit that waits whole on the host is loaded whole for each of its gathers.
    - stores: u m once, whatever the number of micro-batches, without frozen units.
    - gathered weights of S parts that wait on the host: w S m once there, without frozen units, whose copy is never
      old; and w S m for each gather that the copy replaces.
    """
    loaded = stored = 0
    trains = any(action.kind is Kind.STEP for action in actions)
    for unit in units:
        part, moves = unit.part(sharding), _moves_of(actions, unit.chunks, 3, unit.frozen)
        gathers = moves.gathers
        if unit.is_gathered(sharding):
            full = size.weights_of(unit) * part * unit.parts(sharding)
            loaded += full * moves.loads
            stored += full * moves.stores
        else:
            # Such a unit comes as it does for a gather.
            gathers += moves.loads
        if unit.whole_on == "host":
            loaded += size.weights_of(unit) * part * gathers
        if offload is None or stays(unit, offload):
            continue
        updates = trains and not unit.frozen
        loaded += size.weights_of(unit) * part * (gathers if offload.parameters else updates)
        stored += size.master * part * updates
    return BusBytes(loaded, stored)


def weights_on_host(
    actions: Sequence[Action], units: Sequence[UnitSize], sharding: Sharding, size: ElementBytes
) -> int:
    """Returns the bytes of gathered weights that wait on a rank's host in a step, w S m for each unit."""
    stored = {action.chunk for action in actions if action.kind is Kind.STORE_WEIGHTS}
    return sum(
        size.weights_of(unit) * unit.part(sharding) * unit.parts(sharding)
        for unit in units
        if unit.is_gathered(sharding) and stored.intersection(unit.chunks)
    )


def narrow_bytes(elements: int, activation_dtype: ActivationType) -> int:
    """Returns the bytes that a tensor of so many elements takes in a message, in the type in which hidden states
    travel: 2 each in bf16; in fp8 1 each, and 4 for every block."""
    return 2 * elements if activation_dtype == "bf16" else elements + 4 * -(-elements // FP8_BLOCK)


def hidden_bytes(elements: int, activation_dtype: ActivationType | None) -> int | None:
    """Returns the bytes of hidden states of so many ``elements`` in a message; None if they travel as they are."""
    if activation_dtype is None or elements < LEAST_ROUNDED:
        return None
    return narrow_bytes(elements, activation_dtype)


def hop_bytes(rank: int, placement: Placement, micro_batches: int, activations: ActivationBytes) -> int:
    """Returns the bytes of results that a pipeline rank sends to others in a step. Gradients of as many bytes come
    back."""
    return micro_batches * sum(
        activations.chunks[chunk].message
        for chunk, (own, following) in enumerate(zip(placement, placement[1:]))
        if own == rank != following
    )


class ExpertLayer(NamedTuple):
    """A layer whose experts E ranks divide, as far as its all-to-alls go."""

    expert_ranks: int
    token_bytes: float
    """Bytes that an all-to-all has of each token: as many copies as a token has experts or, where the capacity of
    experts sets the size, that factor more."""
    number_bytes: int = 0
    """Bytes of the numbers of tokens that ranks tell each other before; 0 where they need not."""


class AllToAlls(NamedTuple):
    """What the layers with divided experts of a pipeline rank send, if all experts get as many tokens."""

    calls: int
    """In a step."""
    token_bytes: float
    """Of every token of a step."""
    number_bytes: int
    """In a step."""


def all_to_alls(actions: Sequence[Action], layers: Mapping[int, Sequence[ExpertLayer]]) -> AllToAlls:
    """Counts the all-to-alls of a rank's program.

    A forward of a layer has two, which take tokens to their experts and results back; a recomputation has them again.
    A backward has two, for the gradients of both. Each sends all but this rank's own 1/E. An all-to-all of numbers
    comes before each forward and recomputation where sizes are known only then. A layer whose input needs no gradient,
    as behind frozen embeddings, has one less in a backward, which counts here.

    Args:
        layers: those with divided experts, by chunk.
    """
    backwards = Counter(action.chunk for action in actions if action.kind is Kind.BACKWARD)
    again = Counter(action.chunk for action in actions if action.kind is Kind.BACKWARD and action.recomputed)
    forwards = Counter(action.chunk for action in actions if action.kind is Kind.FORWARD) + again
    calls, token_bytes, number_bytes = 0, 0.0, 0
    for chunk, own in layers.items():
        for layer in own:
            others, with_tokens = 1 - 1 / layer.expert_ranks, 2 * (forwards[chunk] + backwards[chunk])
            calls += with_tokens + (forwards[chunk] if layer.number_bytes else 0)
            token_bytes += with_tokens * others * layer.token_bytes
            number_bytes += round(forwards[chunk] * others * layer.number_bytes)
    return AllToAlls(calls, token_bytes, number_bytes)
