"""The specification from which a program is derived."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from ds_lgamp.schedule.actions import Action, Kind, Segments, chunk_beyond, joined
from ds_lgamp.schedule.orders import (
    ORDERS,
    SCHEDULES,
    SINGLE_CHUNK_SCHEDULES,
    by_calls,
    forward_only,
    turns_at_once,
)
from ds_lgamp.schedule.placement import Placement, place_chunks

ActivationType = Literal["bf16", "fp8"]
"""In which type hidden states and their gradients travel between pipeline ranks, if not as they are."""
LEAST_ROUNDED = 1024
"""A tensor with fewer elements travels between pipeline ranks as it is: sums, such as of losses or of a router's
choices, are no hidden states."""
FP8_BLOCK = 128
"""How many elements share a scale in fp8."""
SENDS_IN_FLIGHT = 2
"""How many messages of one kind on one link may be under way before the sender waits for the oldest. A rank that posts
receives early has more of them posted, so the wait is short."""
RECEIVES_POSTED = 3
"""How many receives of one kind a rank keeps posted early if no messages pile up. One is for the next compute, one is
in flight, and one tells its sender early that it may send. With two, large messages on a slow link wait for that
permission (docs/performance.md)."""
DISK_BLOCK = 4096
"""The disk moves multiples of so many bytes."""
PIECE = 8 << 20
"""Bytes of a piece of a tensor that moves on its own."""
PIECES = 4
"""How many pieces move at once, and how many of each direction of the bus have a buffer."""
UPDATE_BUFFERS = 2
"""Units in memory: one that is updated, and one that is written and then read for the next update."""
BLOCK_ON_HOST, BLOCK_ON_DEVICE = 1 << 20, 1 << 22
"""The most elements that an update in bf16 copies to fp32 at once: what stays in caches, and what keeps an
accelerator busy."""
STATE_BLOCK = 256
"""So many elements of a parameter share a scale in optimizer state of 8 bits. With such state they are the alignment:
then a block lies in one parameter and in one part, as where one process has the whole parameter."""
RANDOM_NUMBERS = 262_139
"""How many random numbers such updates use again and again. A prime, so that elements with the same one are no column
of a matrix."""

UPDATES = ("step", "reduction", "next_step")
"""When the optimizer updates a chunk:

- step: at STEP, with all other chunks.
- reduction: as soon as its gradient is final. STEP updates what several chunks share.
- next_step: during the next step, before the chunk's first gather, or before its first forward at stage 0. STEP decides
  whether and how. With offloading, the host begins directly after STEP.
"""


class Hierarchy(NamedTuple):
    """How ZeRO stage 3 spreads its shards over nodes. W data-parallel ranks form nodes of h ranks each: node n has the
    ranks n h to (n + 1) h - 1.

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


class Offload(NamedTuple):
    """What lies in the memory of the host while the device does not need it.

    The host holds the optimizer's state and master weights, and updates them. Every chunk's gradient is stored once per
    step, and its weights are loaded once after every update.
    """

    parameters: bool = False
    """Whether it also holds this rank's shards of the parameters (stage 3). Each gather then begins with a load."""
    on_device: tuple[int, ...] = ()
    """Chunks of which the host holds nothing (stage 3). STEP updates them on the device, and also what several chunks
    share, because copies on other ranks must be updated alike."""
    alone: bool = False
    """Whether there is one data-parallel rank. Its reductions move nothing, so their waits follow them directly, and
    gradients leave as soon as they are final."""


class Update(NamedTuple):
    """When the optimizer updates a chunk, and how the result travels."""

    when: str | None
    """One of :data:`UPDATES`; None if nothing of the chunk trains."""
    on_host: bool
    """Whether the host updates it, beside the program."""
    ready_after: Kind
    """The kind of wait after which a rank has the chunk's reduced gradient."""
    brought_by: Kind | None
    """The kind of collective that brings other ranks' updates once per step; None if every use gathers them, or if
    there are none."""
    is_deferred: bool
    """Whether that collective runs during the next step instead of directly after STEP."""


@dataclass(frozen=True)
class ProgramSpec:
    """Everything a program is derived from. Raises ValueError if the combination is impossible."""

    placement: Placement
    """Pipeline rank of every chunk."""
    schedule: str
    micro_batches: int
    micro_batch_group: int
    """How many micro-batches pass through a chunk together (layered only); all ``micro_batches`` is LGA."""
    zero_stage: int
    resident_chunks: int = 2
    """How many chunks may hold full weights at once under ZeRO stage 3. Stages 1 to 3 await reductions when so many
    full gradients are held."""
    forward_only: bool = False
    defers_gathers: bool = False
    """Whether what a step updated is gathered during the next step, each chunk one visit early, instead of after the
    step: weights at stages 1 and 2, the shards of nodes at stage 3."""
    updates: str = "step"
    """One of :data:`UPDATES`."""
    receives_on_arrival: bool = False
    """Whether a rank posts a receive when its message has been sent, as streams that share hardware queues require,
    instead of well before its use (:mod:`ds_lgamp.schedule.transfers`)."""
    hierarchy: Hierarchy | None = None
    """How stage 3 spreads its shards over nodes; None if it spreads all over all data-parallel ranks."""
    offload: Offload | None = None
    """What the host holds and updates; None if everything stays on the device. ``updates`` is then "reduction" or
    "next_step", and the updates run beside the program."""

    stores_inputs: bool = False
    """Whether the inputs of recomputed chunks wait for their backward on the host."""
    stores_weights: bool = False
    """Whether weights that a step has gathered and needs again later wait on the host in between (stage 3)."""
    recomputes: bool = True
    """Whether backwards compute their chunks again, from stored inputs. :meth:`marked` says which ones."""
    kept: frozenset[tuple[int, int]] = frozenset()
    """Pairs of chunk and micro-batch that are not recomputed although the spec recomputes: autograd keeps what it has
    saved of them. A pipeline rank may know its own chunks only, because no other rank depends on them. A script may end
    a batch early, so pairs of micro-batches that the batch does not have mean nothing."""
    selective: frozenset[tuple[int, int]] = frozenset()
    """The kept pairs whose layers recompute a part of themselves, and of which autograd saves less."""
    first_trained: int = 0
    """The first chunk with something to train. Gradients end there: chunks below it have no backward."""
    split_backward: int = 0
    """How many backwards of a rank may wait for their second part, which computes gradients of weights
    (:mod:`ds_lgamp.schedule.split_backward`). 0 if every backward is whole."""
    whole_chunks: frozenset[int] = frozenset()
    """Chunks whose backwards have one part all the same."""
    overlaps_exchanges: bool = False
    """Whether consecutive forwards of a chunk compute beside each other's exchanges of tokens, in pairs, and so do the
    forwards that consecutive backwards repeat. Pairs are the same on all data-parallel ranks, so the order of their
    exchanges is, too."""
    returns_outputs: bool = False
    """Whether the script computes the loss from outputs, call by call (:func:`ds_lgamp.schedule.orders.by_calls`). Up
    to the RETURN of a call, programs with more calls are alike, because a script may end a batch early."""

    def __post_init__(self) -> None:
        _require(self.schedule in SCHEDULES, "schedule", self.schedule, f"use one of {', '.join(SCHEDULES)}")
        _require(self.micro_batches >= 1, "micro_batches", self.micro_batches, "use at least 1")
        _require(self.micro_batch_group >= 1, "micro_batch_group", self.micro_batch_group, "use at least 1")
        _require(self.zero_stage in (0, 1, 2, 3), "zero_stage", self.zero_stage, "use 0, 1, 2 or 3")
        _require(self.resident_chunks >= 1, "resident_chunks", self.resident_chunks, "use at least 1")
        _require(
            self.hierarchy is None or self.zero_stage == 3, "zero_stage", self.zero_stage, "hierarchical shards need 3"
        )
        if self.stores_weights:
            _require(self.zero_stage == 3, "zero_stage", self.zero_stage, "only stage 3 gathers weights again")
            _require(self.hierarchy is None, "hierarchy", self.hierarchy, "shards of nodes are gathered inside a node")
        if self.overlaps_exchanges:
            _require_overlap(self)
        _require(self.split_backward >= 0, "split_backward", self.split_backward, "use at least 0")
        _require(0 <= self.first_trained < self.chunks, "first_trained", self.first_trained, "name a chunk")
        _require(self.updates in UPDATES, "updates", self.updates, f"use one of {', '.join(UPDATES)}")
        if self.returns_outputs:
            whole = self.micro_batches % self.pipeline_ranks == 0
            _require(whole, "micro_batches", self.micro_batches, "a call gives one to each pipeline rank")
        if self.offload is not None:
            _require_offloadable(self, self.offload)
        if self.updates == "next_step" and self._brought_by is not None:
            _require(self.defers_gathers, "updates", self.updates, "nothing is updated yet to gather; defer gathers")
        if self.schedule == "interleaved_1f1b":
            _require_interleaved(self)
        if self.schedule == "zbv":
            _require(
                self.placement == (*range(self.pipeline_ranks), *reversed(range(self.pipeline_ranks))),
                "schedule",
                self.schedule,
                f"it takes two chunks per rank in placement 'vee', but this placement is {self.placement}; remove "
                "placement and set chunks_per_rank to 2",
            )
        if self.schedule in SINGLE_CHUNK_SCHEDULES:
            _require(
                self.placement == tuple(range(self.pipeline_ranks)),
                "schedule",
                self.schedule,
                f"it takes one chunk per rank in the order of the ranks, but this placement has {self.chunks} chunks "
                f"on {self.pipeline_ranks} ranks; set chunks_per_rank to 1",
            )
        if self.schedule != "layered":
            _require(
                self.micro_batch_group >= self.micro_batches,
                "micro_batch_group",
                self.micro_batch_group,
                f"groups belong to the layered schedule; remove it or replace schedule '{self.schedule}'",
            )

    @cached_property
    def pipeline_ranks(self) -> int:
        return max(self.placement) + 1

    @property
    def chunks(self) -> int:
        return len(self.placement)

    @cached_property
    def chunk_updates(self) -> dict[int, Update]:
        """When each chunk is updated. STEP updates on the device what the host leaves there."""
        return {chunk: self._update_of(chunk) for chunk in range(self.chunks)}

    def _update_of(self, chunk: int) -> Update:
        when: str | None = self.updates
        on_host = self.offload is not None and chunk not in self.offload.on_device
        if chunk < self.first_trained:
            when = None
        elif self.offload is not None and not on_host:
            when = "step"
        ready_after = Kind.WAIT_REDUCE if self.hierarchy is None else Kind.WAIT_COMBINE
        return Update(when, on_host, ready_after, self._brought_by, self.defers_gathers)

    @property
    def _brought_by(self) -> Kind | None:
        if self.zero_stage == 3:
            return Kind.REFRESH if self.hierarchy is not None and not self.hierarchy.replicated else None
        return Kind.GATHER if self.zero_stage > 0 else None

    @property
    def loss_rank(self) -> int:
        """The pipeline rank of the last chunk."""
        return self.placement[-1]

    def evaluation(self, micro_batches: int | None = None) -> "ProgramSpec":
        """Returns the forward-only spec on the same chunks. ``micro_batches`` defaults to this spec's."""
        count = self.micro_batches if micro_batches is None else micro_batches
        alone: dict[str, Any] = {"forward_only": True, "returns_outputs": False, "overlaps_exchanges": False}
        nothing: frozenset[Any] = frozenset()
        return replace(self, micro_batches=count, micro_batch_group=count, kept=nothing, selective=nothing, **alone)

    def segments(self, rank: int) -> Segments:
        """Returns the compute order of ``rank``, cut where the script has its turn."""
        order = forward_only if self.forward_only else ORDERS[self.schedule]
        counts = self.micro_batches, self.micro_batch_group
        if self.returns_outputs:
            segments = by_calls(order, self.placement, rank, *counts)
        else:
            segments = [list(order(self.placement, rank, *counts))]
        return [
            [action for action in segment if action.kind is not Kind.BACKWARD or action.chunk >= self.first_trained]
            for segment in segments
        ]

    def computes(self, rank: int) -> list[Action]:
        """Returns the compute order of ``rank``, with RETURN where the script has its turn."""
        return joined(self.segments(rank))

    def receives_input(self, action: Action) -> bool:
        """Whether the input of a compute comes from another pipeline rank."""
        return self.source_rank(action) is not None

    def source_rank(self, action: Action) -> int | None:
        """Returns the other pipeline rank from which the input of a compute comes; None if its own rank has it."""
        source = self.source_chunk(action)
        if source is None or self.placement[source] == self.placement[action.chunk]:
            return None
        return self.placement[source]

    def peer(self, message: Action) -> int:
        """Returns the pipeline rank at the other end of a SEND or RECV."""
        return self.placement[chunk_beyond(message)]

    def sends_output(self, action: Action) -> bool:
        """Whether the result of a compute goes to another pipeline rank. A second part of a backward has none."""
        if action.kind is Kind.FORWARD:
            target = action.chunk + 1
            return target < self.chunks and self.placement[target] != self.placement[action.chunk]
        target = action.chunk - 1
        exists = action.kind is Kind.BACKWARD and target >= self.first_trained
        return exists and self.placement[target] != self.placement[action.chunk]

    def source_chunk(self, action: Action) -> int | None:
        """Returns the chunk whose output or input gradient a compute consumes; None at the ends of the model."""
        source = action.chunk - 1 if action.kind is Kind.FORWARD else action.chunk + 1
        return source if 0 <= source < len(self.placement) else None

    def marked(self, compute: Action) -> Action:
        """Returns a compute with whether it is recomputed, and whether its layers recompute a part of themselves."""
        if compute.chunk not in self.recomputed_chunks:
            return compute
        pair = compute[1:3]
        return compute._replace(recomputed=pair not in self.kept, selective=pair in self.selective)

    @cached_property
    def recomputed_chunks(self) -> frozenset[int]:
        """The chunks whose backwards compute them again, but for pairs that are ``kept``.

        The model's last chunk is not recomputed if each of its backwards directly follows its forward: autograd then
        keeps the tensors of only one micro-batch at a time.
        """
        if not self.recomputes or self.forward_only:
            return frozenset()
        at_once = not self.returns_outputs and turns_at_once(self.schedule, self.micro_batches, self.pipeline_ranks)
        return frozenset(range(self.first_trained, self.chunks - 1 if at_once else self.chunks))

    @cached_property
    def split_chunks(self) -> frozenset[int]:
        """The chunks whose backwards have two parts. Nobody waits for the gradient of the first one's input, nor do
        ranks without neighbours wait."""
        if not self.split_backward or self.forward_only or self.pipeline_ranks == 1:
            return frozenset()
        return frozenset(range(self.first_trained + 1, self.chunks)) - self.whole_chunks

    def overlaps(self, first: Action, second: Action) -> bool:
        """Whether two consecutive computes could run beside each other's exchanges: forwards of a chunk, or backwards
        that repeat them. The model's last chunk computes the loss, with memory for one micro-batch."""
        alike = first.kind is second.kind and first.chunk == second.chunk < self.chunks - 1
        computes = first.kind is Kind.FORWARD or (first.kind is Kind.BACKWARD and first.chunk in self.recomputed_chunks)
        return self.overlaps_exchanges and alike and computes

    def is_final_backward(self, action: Action) -> bool:
        """Whether the chunk's gradient is reduced after this action.

        Stages 2 and 3 keep no full gradient between micro-batch groups, so they reduce after each group. Stages 0 and 1
        reduce once per step.
        """
        last_part = Kind.WEIGHTS_BACKWARD if action.chunk in self.split_chunks else Kind.BACKWARD
        if action.kind is not last_part:
            return False
        done = action.micro_batch + 1
        if done == self.micro_batches:
            return True
        return self.zero_stage >= 2 and self.schedule == "layered" and done % self.micro_batch_group == 0


def _require(condition: bool, key: str, value: object, fix: str) -> None:
    if not condition:
        raise ValueError(f"{key} is {value!r}: {fix}")


def _require_offloadable(spec: ProgramSpec, offload: Offload) -> None:
    _require(spec.zero_stage > 0, "zero_stage", spec.zero_stage, "offloading needs 1, 2 or 3")
    if offload.parameters:
        _require(spec.zero_stage == 3, "zero_stage", spec.zero_stage, "offloading of parameters needs 3")
    if offload.on_device:
        _require(spec.zero_stage == 3, "zero_stage", spec.zero_stage, "offloading of some chunks needs 3")
        _require(
            set(offload.on_device) < set(range(spec.chunks)),
            "on_device",
            offload.on_device,
            f"leave at least one of {spec.chunks} chunks to the host",
        )
    _require(spec.hierarchy is None, "hierarchy", spec.hierarchy, "shards of nodes cannot be offloaded")
    _require(spec.updates != "step", "updates", spec.updates, 'offloading needs "reduction" or "next_step"')
    if spec.zero_stage < 3:
        _require(spec.defers_gathers, "defers_gathers", False, "nothing is loaded yet to gather; defer gathers")


def _require_overlap(spec: ProgramSpec) -> None:
    alone = "computes that overlap exchanges have two micro-batches at once"
    _require(not spec.kept, "kept", spec.kept, alone)
    _require(not spec.split_backward, "split_backward", spec.split_backward, f"{alone}; use 0")
    _require(not spec.stores_inputs, "stores_inputs", spec.stores_inputs, f"{alone}; leave inputs on the device")


def _require_interleaved(spec: ProgramSpec) -> None:
    ranks, modular = spec.pipeline_ranks, place_chunks("modular", spec.chunks, spec.pipeline_ranks)
    _require(spec.placement == modular, "placement", "contiguous", "interleaved_1f1b needs modular placement")
    _require(
        spec.chunks % ranks == 0,
        "schedule",
        spec.schedule,
        f"{spec.chunks} chunks are not a multiple of {ranks} pipeline ranks; set chunks_per_rank",
    )
    _require(
        spec.forward_only or spec.micro_batches % ranks == 0,
        "schedule",
        spec.schedule,
        f"{spec.micro_batches} micro-batches are not a multiple of {ranks} pipeline ranks; use layered, which "
        "takes any number",
    )
