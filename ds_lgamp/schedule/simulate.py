"""The project's only clock: runs a program on paper.

- Forwards, backwards, hops, collectives and updates take time. Posts and sends are free.
- Where a backward has two parts, the second one takes its time when it runs. Nobody waits for it.
- Where exchanges overlap, both forwards of a pair begin when both have their inputs. What is left of the second one
  when the first one ends is its time. A pair of backwards repeats both forwards so.
- A hop delays only the receiver. A rank's messages leave one after another.
- The gathers and reductions of a rank run one after another, as on one communicator, beside its compute. The program
  says when they are launched and awaited. They may share a network card with its messages
  (:mod:`ds_lgamp.schedule.card`). With hierarchical shards, so do the collectives between nodes, beside those inside.
- With offloading, loads, stores and updates on the host run beside all that, each kind one after another.
- The simulated step is one of many. Actions after STEP count as those of the previous step and start at time 0. The
  step ends with the last update on the host if that follows a reduction: the next step waits for it first.
- All data-parallel ranks behave alike.
- A script's turn takes no time, but begins on all pipeline ranks together.
- Tied modules travel beside chunks. Only the sum of their copies is a cost of its own.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul

from ds_lgamp.schedule.actions import (
    COLLECTIVES,
    STARTED,
    TRANSFERS,
    WAITS,
    Action,
    Kind,
    Program,
    awaited_by,
    receive_matching,
)
from ds_lgamp.schedule.card import Card, SharedCard, Span, Wait
from ds_lgamp.schedule.costs import UNIT_DURATIONS, Costs, Durations, overlapped, uniform_costs
from ds_lgamp.schedule.spec import ProgramSpec

# A module's names are faster than the members of an Enum, and programs have millions of actions.
_FORWARD, _BACKWARD = Kind.FORWARD, Kind.BACKWARD
_SEND_FORWARD, _SEND_BACKWARD = Kind.SEND_FORWARD, Kind.SEND_BACKWARD
_START_FORWARD, _START_BACKWARD = Kind.START_FORWARD, Kind.START_BACKWARD
_RECV_FORWARD, _RECV_BACKWARD = Kind.RECV_FORWARD, Kind.RECV_BACKWARD
_UPDATE, _RETURN, _WEIGHTS_BACKWARD = Kind.UPDATE, Kind.RETURN, Kind.WEIGHTS_BACKWARD


@dataclass
class Timeline:
    """When everything ran, and what waited, for each pipeline rank."""

    spans: list[list[Span]]
    """Compute actions."""
    collectives: list[list[Span]]
    """Gathers, reductions and what goes on between nodes; with offloading, also transfers and updates on the host."""
    waits: list[list[Wait]]
    """In the order they ran."""
    updates: list[list[Span]]
    """The optimizer's updates: UPDATE of single chunks, and STEP, which begins with the sum of tied modules. Empty if
    they take no time."""
    ideal: float
    """Compute time of a rank if work were spread evenly and no rank waited."""
    arrivals: Mapping[Kind, Sequence[Sequence[float | None]]]
    """When each forward and backward had its input, by kind, chunk and micro-batch; None if there was no such
    compute."""
    step_time: float = field(init=False)
    """When the last compute, wait or update ends, on the host too."""
    bubble: float = field(init=False)
    """(step_time - ideal) / ideal."""

    def __post_init__(self) -> None:
        on_host = [[span for span in spans if span.action.kind is _UPDATE] for spans in self.collectives]
        lists: list[list[Span] | list[Wait]] = [*self.spans, *self.waits, *self.updates, *on_host]
        self.step_time = max((entries[-1].end for entries in lists if entries), default=0.0)
        self.bubble = (self.step_time - self.ideal) / self.ideal if self.ideal else 0.0

    def exposed(self, kind: Kind) -> list[float]:
        """Returns how long each rank stood still for its collectives of one ``kind``."""
        return [
            sum(wait.end - wait.start for wait in waits if awaited_by(wait.action).kind is kind) for waits in self.waits
        ]


class DeadlockError(RuntimeError):
    """No rank can advance. ``positions`` holds the row where each rank stands."""

    def __init__(self, positions: Sequence[int]) -> None:
        super().__init__("deadlock: every pipeline rank waits for another")
        self.positions = list(positions)


def simulate(
    spec: ProgramSpec,
    program: Program,
    costs: Durations | Costs = UNIT_DURATIONS,
    blocking_sends: bool = False,
    sends_at_once: bool = False,
) -> Timeline:
    """Runs ``program`` and returns its timeline.

    Args:
        blocking_sends: whether each SEND waits until its RECV is posted, as the validator assumes. The engine's sends
            wait only if several of a link are under way.
        sends_at_once: whether a compute sends its result without a SEND. The clock then runs a program that lacks SEND
            and RECV, as :func:`ds_lgamp.schedule.program.build_timed_program` builds it.

    Raises DeadlockError if no rank can advance, and ValueError if ``costs`` do not fit ``spec``.
    """
    if isinstance(costs, Durations):
        costs = uniform_costs(spec, costs)
    else:
        costs.check(spec)
    run = _Run(spec, program, costs, blocking_sends, sends_at_once)
    run.to_the_end()
    cards = run.cards
    for card in cards:
        card.finish()
    return Timeline(
        run.spans,
        [card.spans for card in cards],
        [card.waits for card in cards],
        run.steps(),
        _ideal(spec, costs),
        {kind: [way.arrivals for way in run.ways[kind]] for kind in (_FORWARD, _BACKWARD)},
    )


def _ideal(spec: ProgramSpec, costs: Costs) -> float:
    """Returns the compute time of a rank if work were spread evenly and no rank waited. Exchanges count as compute,
    but for those that others may overlap."""
    shares = [1.0] * spec.chunks
    if spec.overlaps_exchanges and costs.exchange:
        shares = [1 - exchange / whole if whole else 1.0 for exchange, whole in zip(costs.exchange, costs.forward)]
    cost = sum(map(mul, costs.forward, shares))
    if not spec.forward_only:
        cost += sum(costs.backward[spec.first_trained :])
        cost += sum(costs.recompute[chunk] * shares[chunk] for chunk in spec.recomputed_chunks)
    cost *= spec.micro_batches
    for chunk, micro_batch in spec.kept:
        if chunk in spec.recomputed_chunks and micro_batch < spec.micro_batches:
            cost -= costs.recompute[chunk]
    return cost / spec.pipeline_ranks


def peak_live_activations(actions: Sequence[Action]) -> int:
    """Returns the most inputs a rank stores at once, one per chunk and micro-batch between forward and backward."""
    live = peak = 0
    trained = {action.chunk for action in actions if action.kind is Kind.BACKWARD}
    for action in actions:
        if action.kind is Kind.FORWARD and action.chunk in trained:
            live += 1
            peak = max(peak, live)
        elif action.kind is Kind.BACKWARD:
            live -= 1
    return peak


class _Way:
    """One direction of a chunk: what it costs, and when its inputs arrive."""

    __slots__ = ("arrivals", "cost", "crosses", "latency", "message", "owner", "recomputed_cost", "target")

    def __init__(self, owner: int, cost: float, again: float, micro_batches: int) -> None:
        self.owner, self.cost, self.recomputed_cost = owner, cost, cost + again
        self.arrivals: list[float | None] = [None] * micro_batches
        """When the input of each micro-batch is there; None while nobody knows."""
        self.target: _Way | None = None
        """What consumes the results."""
        self.crosses = False
        """Whether results go to another rank."""
        self.message = self.latency = 0.0
        """How long a result keeps the card busy, and how much longer it takes to arrive."""

    def lead_to(self, target: "_Way", costs: Costs) -> None:
        link = self.owner, target.owner
        self.target, self.crosses = target, self.owner != target.owner
        if self.crosses:
            self.message = costs.message[link]
            self.latency = costs.hop[link] - self.message


def _ways(spec: ProgramSpec, costs: Costs) -> dict[Kind, list[_Way]]:
    """Connects forwards to the next chunk, the last forward to its own backward, and backwards to the chunk before, as
    far as chunks train."""
    forwards, backwards = (
        [_Way(owner, cost, again, spec.micro_batches) for owner, cost, again in zip(spec.placement, by_chunk, more)]
        for by_chunk, more in (
            (costs.forward, [0.0] * spec.chunks),
            (costs.parts_of_backward(spec)[0], costs.recompute),
        )
    )
    forwards[0].arrivals = [0.0] * spec.micro_batches
    path = [*forwards, *reversed(backwards[spec.first_trained :])]
    for way, target in zip(path, path[1:]):
        way.lead_to(target, costs)
    return {_FORWARD: forwards, _BACKWARD: backwards, _SEND_FORWARD: forwards, _SEND_BACKWARD: backwards}


class _Run:
    """Advances each rank until it waits for another rank, which later wakes it."""

    def __init__(
        self, spec: ProgramSpec, program: Program, costs: Costs, blocking_sends: bool, sends_at_once: bool
    ) -> None:
        self.spec, self.program, self.costs = spec, program, costs
        self.blocking_sends, self.sends_at_once = blocking_sends, sends_at_once
        self.ways = _ways(spec, costs)
        self.second_parts = costs.parts_of_backward(spec)[1]
        self.launched = COLLECTIVES | TRANSFERS | ({_UPDATE} if spec.offload is not None else set())
        """Kinds of actions that run beside compute."""
        self.cards = [(SharedCard if costs.shares_card else Card)(costs) for _ in program]
        self.ends = [_end_of_step(actions) for actions in program]
        """The row after each rank's STEP. Collectives from there on run when the next step begins."""
        for card, actions, end in zip(self.cards, program, self.ends):
            for action in actions[end:]:
                if action.kind in self.launched:
                    card.launch(action, 0.0)
        self.position = [0] * len(program)
        self.now = [0.0] * len(program)
        self.spans: list[list[Span]] = [[] for _ in program]
        self.updates: list[list[Span]] = [[] for _ in program]
        self.awaited: list[tuple[_Way, int] | None] = [None] * len(program)
        """The input that each rank waits for: of which chunk and direction, and of which micro-batch."""
        self.beside: list[dict[int, float]] = [{} for _ in program]
        """How long each of the two forwards takes, by micro-batch, that each rank computes beside each other."""
        self.posted: set[Action] = set()
        self.blocked: dict[Action, int] = {}
        """The rank whose SEND waits for a RECV."""
        self.returned: dict[Action, dict[int, float]] = defaultdict(dict)
        """When each rank came to a RETURN."""

    def to_the_end(self) -> None:
        runnable = list(range(len(self.program)))
        while runnable:
            rank = runnable.pop()
            runnable.extend(self.advance(rank))
        if any(position < len(actions) for position, actions in zip(self.position, self.program)):
            raise DeadlockError(self.position)

    def advance(self, rank: int) -> list[int]:
        """Runs ``rank`` as far as it gets. Returns the ranks that this wakes."""
        woken: list[int] = []
        actions, card, spans, launched = self.program[rank], self.cards[rank], self.spans[rank], self.launched
        row, now, beside = self.position[rank], self.now[rank], self.beside[rank]
        self.awaited[rank] = None
        while row < len(actions):
            action = actions[row]
            kind, chunk, micro_batch, recomputed, _ = action
            if kind is _FORWARD or kind is _BACKWARD:
                way = self.ways[kind][chunk]
                start = way.arrivals[micro_batch]
                if start is None:
                    self.awaited[rank] = way, micro_batch
                    break
                if now > start:
                    start = now
                cost = way.recomputed_cost if recomputed else way.cost
                now = start + (beside.pop(micro_batch) if beside else cost)
                spans.append(Span(start, now, action))
                if not way.crosses:
                    self.deliver(way, micro_batch, now, woken)
                elif self.sends_at_once:
                    self.deliver(way, micro_batch, card.send(now, way.message) + way.latency, woken)
            elif kind is _SEND_FORWARD or kind is _SEND_BACKWARD:
                if self.blocking_sends and not self.is_posted(rank, action):
                    break
                way = self.ways[kind][chunk]
                self.deliver(way, micro_batch, card.send(now, way.message) + way.latency, woken)
            elif kind is _START_FORWARD or kind is _START_BACKWARD:
                begun = self.begin_beside(rank, action, actions[row + 1].micro_batch, now)
                if begun is None:
                    break
                now = begun
            elif kind is _RECV_FORWARD or kind is _RECV_BACKWARD:
                if self.blocking_sends:
                    self.post(action, woken)
            elif kind is _WEIGHTS_BACKWARD:
                spans.append(Span(now, now + self.second_parts[chunk], action))
                now += self.second_parts[chunk]
            elif kind in WAITS:
                now = card.wait(action, now)
            elif kind is _RETURN:
                together = self.together(rank, action, now, woken)
                if together is None:
                    break
                now = together
            elif kind in launched:
                if row < self.ends[rank]:
                    card.launch(action, now)
            elif kind is _UPDATE:
                now += self.costs.update[chunk]
                if self.costs.update[chunk]:
                    self.updates[rank].append(Span(now - self.costs.update[chunk], now, action))
            row += 1
        self.position[rank], self.now[rank] = row, now
        return woken

    def begin_beside(self, rank: int, action: Action, first: int, now: float) -> float | None:
        """Begins the second of two computes that take turns; ``first`` is the other one's micro-batch. Returns when
        both can run; None while a message is missing."""
        kind, chunk, micro_batch, *_ = action
        way = self.ways[STARTED[kind]][chunk]
        if kind is _START_BACKWARD:
            forward, own = way.recomputed_cost - way.cost, way.cost
        else:
            forward, own = way.cost, 0.0
            arrival = way.arrivals[micro_batch]
            if arrival is None:
                self.awaited[rank] = way, micro_batch
                return None
            now = max(now, arrival)
        parts = zip((first, micro_batch), self.overlapped(chunk, forward))
        self.beside[rank].update((each, part + own) for each, part in parts)
        return now

    def overlapped(self, chunk: int, forward: float) -> tuple[float, float]:
        """Returns how long two forwards take that compute beside each other's exchanges. One that is repeated exchanges
        for the same share of its time."""
        costs, whole = self.costs, self.costs.forward[chunk]
        if not costs.exchange or not whole:
            return forward, forward
        return overlapped(forward, costs.exchange[chunk] * forward / whole, costs.exchanges[chunk])

    def deliver(self, way: _Way, micro_batch: int, time: float, woken: list[int]) -> None:
        """Tells the consumer of a result when it has it."""
        target = way.target
        if target is None:
            return
        target.arrivals[micro_batch] = time
        awaited = self.awaited[target.owner]
        if awaited is not None and awaited[0] is target and awaited[1] == micro_batch:
            woken.append(target.owner)

    def is_posted(self, rank: int, send: Action) -> bool:
        """Whether the RECV of a SEND is posted. If it is not, posting it wakes ``rank``."""
        receive = receive_matching(send)
        if receive in self.posted:
            return True
        self.blocked[receive] = rank
        return False

    def post(self, receive: Action, woken: list[int]) -> None:
        self.posted.add(receive)
        if receive in self.blocked:
            woken.append(self.blocked.pop(receive))

    def together(self, rank: int, action: Action, now: float, woken: list[int]) -> float | None:
        """Returns when all ranks have come to a RETURN; None while others are on their way. The last one wakes them."""
        came = self.returned[action]
        if rank not in came:
            came[rank] = now
            if len(came) == len(self.program):
                woken.extend(other for other in came if other != rank)
        return max(came.values()) if len(came) == len(self.program) else None

    def steps(self) -> list[list[Span]]:
        """Returns the updates of each rank, with STEP if it takes time. The ranks with copies of tied modules begin
        STEP together."""
        tied, update = self.costs.tied, [0.0] * len(self.program)
        for chunk, rank in enumerate(self.spec.placement):
            if self.spec.chunk_updates[chunk].when == "step":
                update[rank] += self.costs.update[chunk]
        together = max((now for now, sums in zip(self.now, tied) if sums), default=0.0)
        for rank, (actions, end) in enumerate(zip(self.program, self.ends)):
            if actions and actions[end - 1].kind is Kind.STEP and tied[rank] + update[rank] > 0:
                start = together if tied[rank] else self.now[rank]
                self.updates[rank].append(Span(start, start + tied[rank] + update[rank], actions[end - 1]))
        return self.updates


def _end_of_step(actions: Sequence[Action]) -> int:
    """Returns the row after STEP, or after the last action if there is no STEP."""
    steps = (row for row in reversed(range(len(actions))) if actions[row].kind is Kind.STEP)
    return next(steps, len(actions) - 1) + 1
