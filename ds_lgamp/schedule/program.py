"""From a compute order to a program: what every pipeline rank does, action by action.

Around each compute action stand, in this order: RELEASE, GATHER, RECV (ahead of use), the compute, its SEND, and REDUCE
when the chunk's gradient is final. Behind STEP stand the gathers that stages 1 and 2 do not defer. Every schedule
shares these passes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.schedule.orders import (
    SCHEDULES,
    SINGLE_CHUNK_SCHEDULES,
    first_turning_chunk,
    forward_only,
    order_of,
    turns_at_once,
)
from ds_lgamp.schedule.placement import Placement, place_chunks
from ds_lgamp.schedule.residency import chunk_visits, current_chunks, resident_windows

Program = list[list[Action]]
"""The actions of every pipeline rank."""

RECEIVES_POSTED = 3
"""Of one kind on a rank, where nothing piles up: the one that computes next, one in flight, and one whose sender may
learn early that it may send. With two, large messages on a slow link wait for that news (docs/performance.md)."""
SENDS_IN_FLIGHT = 2
"""How many messages of one kind on one link may be under way before the sender waits for the oldest. A rank has more
receives posted than that, so the wait is short."""


@dataclass(frozen=True)
class ProgramSpec:
    """Everything a program is derived from. Raises ValueError where the combination is impossible."""

    placement: Placement
    """Pipeline rank of every chunk."""
    schedule: str
    micro_batches: int
    micro_batch_group: int
    """Micro-batches that go through the chunks together (layered only); ``micro_batches`` is LGA."""
    zero_stage: int
    resident_chunks: int = 2
    """Chunks whose full weights may be held at once under ZeRO stage 3."""
    forward_only: bool = False
    defers_gathers: bool = False
    """Whether stages 1 and 2 gather what a step updated in the next step, each chunk one visit ahead, not behind the
    step itself."""

    def __post_init__(self) -> None:
        _require(self.schedule in SCHEDULES, "schedule", self.schedule, f"use one of {', '.join(SCHEDULES)}")
        _require(self.micro_batches >= 1, "micro_batches", self.micro_batches, "use at least 1")
        _require(self.micro_batch_group >= 1, "micro_batch_group", self.micro_batch_group, "use at least 1")
        _require(self.zero_stage in (0, 1, 2, 3), "zero_stage", self.zero_stage, "use 0, 1, 2 or 3")
        _require(self.resident_chunks >= 1, "resident_chunks", self.resident_chunks, "use at least 1")
        if self.schedule == "interleaved_1f1b":
            self._require_interleaved()
        if self.schedule in SINGLE_CHUNK_SCHEDULES:
            _require(
                self.placement == tuple(range(self.pipeline_ranks)),
                "schedule",
                self.schedule,
                f"it takes one chunk per rank in the order of the ranks, this placement has {self.chunks} chunks on "
                f"{self.pipeline_ranks} ranks; set chunks_per_rank to 1",
            )
        if self.schedule != "layered":
            _require(
                self.micro_batch_group >= self.micro_batches,
                "micro_batch_group",
                self.micro_batch_group,
                f"groups belong to the layered schedule; remove it or replace schedule '{self.schedule}'",
            )

    def _require_interleaved(self) -> None:
        ranks = self.pipeline_ranks
        modular = place_chunks("modular", self.chunks, ranks)
        _require(self.placement == modular, "placement", "contiguous", "interleaved_1f1b needs modular placement")
        _require(
            self.chunks % ranks == 0,
            "schedule",
            self.schedule,
            f"it needs a multiple of {ranks} pipeline ranks, there are {self.chunks} chunks; set chunks_per_rank",
        )
        _require(
            self.forward_only or self.micro_batches % ranks == 0,
            "schedule",
            self.schedule,
            f"it needs a multiple of {ranks} pipeline ranks, there are {self.micro_batches} micro-batches; layered "
            "takes any number",
        )

    @cached_property
    def pipeline_ranks(self) -> int:
        return max(self.placement) + 1

    @property
    def chunks(self) -> int:
        return len(self.placement)

    @property
    def loss_rank(self) -> int:
        """The pipeline rank of the last chunk."""
        return self.placement[-1]

    def evaluation(self, micro_batches: int | None = None) -> "ProgramSpec":
        """The forward-only spec on the same chunks."""
        count = self.micro_batches if micro_batches is None else micro_batches
        return replace(self, micro_batches=count, micro_batch_group=count, forward_only=True)

    def computes(self, rank: int) -> Iterator[Action]:
        """The compute order of ``rank``."""
        order = forward_only if self.forward_only else order_of(self.schedule)
        return order(self.placement, rank, self.micro_batches, self.micro_batch_group)

    def receives_input(self, action: Action) -> bool:
        """Whether what a compute action needs comes from another pipeline rank."""
        source = self.source_chunk(action)
        return source is not None and self.placement[source] != self.placement[action.chunk]

    def sends_output(self, action: Action) -> bool:
        """Whether what a compute action produces goes to another pipeline rank."""
        target = action.chunk + 1 if action.kind is Kind.FORWARD else action.chunk - 1
        return 0 <= target < len(self.placement) and self.placement[target] != self.placement[action.chunk]

    def source_chunk(self, action: Action) -> int | None:
        """The chunk whose output or input gradient a compute action consumes; None at the ends of the model."""
        source = action.chunk - 1 if action.kind is Kind.FORWARD else action.chunk + 1
        return source if 0 <= source < len(self.placement) else None

    def receive_window(self, rank: int, kind: Kind) -> int:
        """How many receives of one kind ``rank`` holds posted: ``RECEIVES_POSTED``, or more where messages pile up, on
        the wrap-around link and where the turn begins, while a group larger than the ring passes."""
        forward = kind is Kind.FORWARD
        # Evaluation sends all micro-batches through a chunk, whatever the group, and does not turn.
        group = self.micro_batches if self.forward_only else min(self.micro_batch_group, self.micro_batches)
        turn = self.chunks if self.forward_only else first_turning_chunk(self.placement)
        for chunk, owner in enumerate(self.placement):
            source = chunk - 1 if forward else chunk + 1
            if owner == rank and 0 <= source < self.chunks and self.placement[source] != rank:
                wraps = self.placement[source] > rank if forward else self.placement[source] < rank
                if wraps or max(chunk, source) == turn:
                    return max(RECEIVES_POSTED, group - self.pipeline_ranks + 2)
        return RECEIVES_POSTED

    @cached_property
    def turns_at_once(self) -> bool:
        """Whether the last chunk's backwards follow its forwards at once; it is not recomputed then."""
        return turns_at_once(self.computes(self.loss_rank), self.chunks - 1)

    def is_final_backward(self, action: Action) -> bool:
        """Whether the chunk's gradient is reduced after this action. Stages 2 and 3 keep no full gradient between
        micro-batch groups, so they reduce after each; stages 0 and 1 reduce once a step."""
        if action.kind is not Kind.BACKWARD:
            return False
        done = action.micro_batch + 1
        if done == self.micro_batches:
            return True
        return self.zero_stage >= 2 and self.schedule == "layered" and done % self.micro_batch_group == 0


def build_program(spec: ProgramSpec) -> Program:
    """The programs of all pipeline ranks."""
    return [build_rank_program(spec, rank) for rank in range(spec.pipeline_ranks)]


def build_rank_program(spec: ProgramSpec, rank: int) -> list[Action]:
    """The program of one pipeline rank."""
    computes = list(spec.computes(rank))
    posts = receive_posts(spec, rank, computes)
    visits = chunk_visits(computes)
    windows = iter(resident_windows(visits, spec.zero_stage, spec.resident_chunks, spec.defers_gathers))
    current = current_chunks(visits, spec.zero_stage, spec.defers_gathers)
    resident = list(current)
    program: list[Action] = []
    visited = None
    for index, compute in enumerate(computes):
        if compute.chunk != visited:
            visited = compute.chunk
            window = next(windows)
            program.extend(Action(Kind.RELEASE, chunk) for chunk in sorted(set(resident) - set(window)))
            program.extend(Action(Kind.GATHER, chunk) for chunk in window if chunk not in resident)
            resident = window
        program.extend(posts[index])
        program.append(compute)
        if spec.sends_output(compute):
            program.append(send_of(compute))
        if spec.is_final_backward(compute):
            program.append(Action(Kind.REDUCE, compute.chunk))
    if spec.zero_stage == 3:
        program.extend(Action(Kind.RELEASE, chunk) for chunk in sorted(resident))
    if not spec.forward_only:
        program.append(Action(Kind.STEP))
        program.extend(Action(Kind.GATHER, chunk) for chunk in current)
    return program


def send_of(compute: Action) -> Action:
    """The action that sends what ``compute`` produced."""
    kind = Kind.SEND_FORWARD if compute.kind is Kind.FORWARD else Kind.SEND_BACKWARD
    return Action(kind, compute.chunk, compute.micro_batch)


def receive_of(compute: Action) -> Action:
    """The action that posts the receive of what ``compute`` consumes."""
    kind = Kind.RECV_FORWARD if compute.kind is Kind.FORWARD else Kind.RECV_BACKWARD
    return Action(kind, compute.chunk, compute.micro_batch)


def receive_matching(send: Action) -> Action:
    """The action that posts the receive of what ``send`` sends."""
    if send.kind is Kind.SEND_FORWARD:
        return Action(Kind.RECV_FORWARD, send.chunk + 1, send.micro_batch)
    return Action(Kind.RECV_BACKWARD, send.chunk - 1, send.micro_batch)


def receive_posts(spec: ProgramSpec, rank: int, computes: Sequence[Action]) -> list[list[Action]]:
    """For every compute action, the receives posted just before it, each kind in the order it is consumed. A receive is
    posted as many computes of its kind ahead of its consumer as its window is wide, and no earlier than the window has
    room. Forwards and backwards may alternate in between, but not more than that."""
    posts: list[list[Action]] = [[] for _ in computes]
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        alike = [index for index, action in enumerate(computes) if action.kind is kind]
        received = [order for order, index in enumerate(alike) if spec.receives_input(computes[index])]
        window = spec.receive_window(rank, kind)
        for position, order in enumerate(received):
            consumer, ahead = alike[order], order - (window - 1)
            early = alike[ahead] if ahead >= 0 else alike[0] + ahead
            room = alike[received[position - window]] + 1 if position >= window else 0
            posts[max(room, early, consumer - 2 * (window - 1))].append(receive_of(computes[consumer]))
    return posts


def _require(condition: bool, key: str, value: object, fix: str) -> None:
    if not condition:
        raise ValueError(f"{key} is {value!r}: {fix}")
