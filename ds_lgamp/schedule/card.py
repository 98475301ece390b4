"""What runs beside the compute of one pipeline rank on the clock: messages, collectives, transfers between host and
device, updates on the host, and the waits for them."""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_lgamp.schedule.actions import BETWEEN_NODES, COLLECTIVES, Action, Kind, awaited_by
from ds_lgamp.schedule.costs import Costs, DiskSeconds
from ds_lgamp.schedule.spec import UPDATE_BUFFERS


class Span(NamedTuple):
    """An action that takes time, and when it ran."""

    start: float
    end: float
    action: Action


class Wait(NamedTuple):
    """A wait for a collective, and when it ran. It takes no time if the collective was done."""

    start: float
    end: float
    action: Action


class DiskDirection:
    """One direction of a disk. It moves everything in pieces, so that work takes all the time that is free from its
    start on."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []
        """When it moves something: begins and ends, in ascending order."""

    def move(self, start: float, seconds: float) -> float:
        """Returns when work is over that takes ``seconds`` alone and may begin at ``start``."""
        if not seconds:
            return start
        busy, end, left = self._busy, start, seconds
        first = last = bisect_left(busy, start, key=lambda one: one[1])
        while last < len(busy) and busy[last][0] < end + left:
            left -= max(0.0, busy[last][0] - end)
            end = busy[last][1]
            last += 1
        end += left
        busy[first:last] = [(min(start, busy[first][0]) if last > first else start, end)]
        return end


class Card:
    """Messages leave one after another. Collectives run one after another beside them, undisturbed.

    With hierarchical shards, collectives inside a node and those between nodes are on two networks. Those on one
    network run one after another. So do loads, stores and updates on the host, each kind beside the others: a bus
    carries as much in each direction at once. A load follows the update of its chunk.
    """

    def __init__(self, costs: Costs) -> None:
        self.cost = {
            Kind.GATHER: costs.gather,
            Kind.REDUCE: costs.reduce,
            Kind.REFRESH: costs.refresh,
            Kind.COMBINE: costs.combine,
            Kind.LOAD: costs.load,
            Kind.STORE: costs.store,
            Kind.STORE_INPUT: costs.input,
            Kind.LOAD_INPUT: costs.input,
            Kind.STORE_WEIGHTS: costs.weights,
            Kind.LOAD_WEIGHTS: costs.weights,
            Kind.UPDATE: costs.update,
        }
        self.spans: list[Span] = []
        """What has ended or whose end is known, each lane in the order of its launches."""
        self.waits: list[Wait] = []
        self._sent = 0.0
        """When the last message has left."""
        self._idle: dict[str, float] = defaultdict(float)
        """When the last action of ``spans`` in each lane ends."""
        self._ends: dict[Action, float] = {}
        """Of the actions that nothing has awaited."""
        self._disk: Sequence[DiskSeconds] = costs.disk
        self._reads, self._writes = DiskDirection(), DiskDirection()
        self._buffers = deque([0.0] * UPDATE_BUFFERS)
        """When each buffer of updates is free, the first one first."""

    def send(self, now: float, time: float) -> float:
        """Returns when a message that takes ``time`` has left if it is sent ``now``."""
        start = self._sent if self._sent > now else now
        self._sent = start + time
        return self._sent

    def launch(self, action: Action, now: float) -> None:
        start = max(now, self._idle[_lane(action.kind)])
        if action.kind is Kind.LOAD:
            start = max(start, self._ends.get(Action(Kind.UPDATE, action.chunk), 0.0))
        cost = self.cost[action.kind][action.chunk]
        if not self._disk:
            self._end(Span(start, start + cost, action))
        elif action.kind is Kind.UPDATE:
            self._update_on_disk(action, now, cost)
        else:
            self._end(Span(start, max(start + cost, self._moved_on_disk(action, start)), action))

    def _moved_on_disk(self, action: Action, start: float) -> float:
        """Returns when the disk has moved what a transfer brings or takes from ``start`` on."""
        disk = self._disk[action.chunk]
        if action.kind is Kind.LOAD:
            return self._reads.move(start, disk.loaded)
        return self._writes.move(start, disk.stored) if action.kind is Kind.STORE else start

    def _update_on_disk(self, action: Action, now: float, cost: float) -> None:
        """Runs an update that takes ``cost`` besides what the disk reads and writes for it."""
        disk, lane = self._disk[action.chunk], _lane(action.kind)
        there = self._reads.move(max(now, self._buffers.popleft()), disk.read)
        start = max(there, self._idle[lane])
        written = self._writes.move(start + cost, disk.written)
        self._buffers.append(written)
        self._end(Span(start, written, action))
        self._idle[lane] = start + cost

    def wait(self, wait: Action, now: float) -> float:
        """Returns when ``wait`` ends if it begins ``now``. An evaluation finds its gathers done."""
        end = self._end_of(awaited_by(wait))
        if end is None:
            return now
        end = max(now, end)
        self.waits.append(Wait(now, end, wait))
        return end

    def finish(self) -> None:
        """Completes ``spans`` once nothing more is sent."""

    def _end(self, span: Span) -> None:
        self._idle[_lane(span.action.kind)] = span.end
        self.spans.append(span)
        self._ends[span.action] = span.end

    def _end_of(self, collective: Action) -> float | None:
        """Returns when a collective ends and forgets it; None if it was not launched."""
        return self._ends.pop(collective, None)


_WAY = {
    **dict.fromkeys((Kind.LOAD_INPUT, Kind.LOAD_WEIGHTS), Kind.LOAD),
    **dict.fromkeys((Kind.STORE_INPUT, Kind.STORE_WEIGHTS), Kind.STORE),
}
"""What shares a direction of the bus with loads of shards and stores of gradients."""


def _lane(kind: Kind) -> str:
    """Returns the lane of actions of this kind. Those of one lane run one after another."""
    if kind in COLLECTIVES:
        return "between nodes" if kind in BETWEEN_NODES else "network"
    return (_WAY.get(kind) or kind).value


@dataclass
class _Pending:
    """A collective that has not ended yet."""

    action: Action
    left: float
    """How long it still takes on a card that it has to itself."""
    start: float | None = None


class SharedCard(Card):
    """Messages and collectives share the bandwidth of one network card.

    Messages leave one after another, and collectives run one after another. While one of each is under way, each gets
    half of the bandwidth. A rank that sends tells the receiver when the message will have left, so that end is final:

    - A message shares with the collectives that were launched before it was sent. It runs at half speed until it or
      they end.
    - A collective that is launched later yields: it gets what the messages sent before it leave over. That is nothing
      until they have left, or half while an earlier collective shares with them. One that takes no time needs nothing.
    - A later message slows a collective down, so the end of a collective becomes known when the rank waits for it. A
      rank that waits sends nothing.

    So the card never carries more than its bandwidth, and carries all of it while something is under way.

    With hierarchical shards, collectives inside a node do not use the card.
    """

    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        self._hierarchical = bool(costs.combine)
        self._queue: deque[_Pending] = deque()
        self._at = 0.0
        """Up to when the queue has been worked off."""

    def send(self, now: float, time: float) -> float:
        start = max(now, self._sent)
        self._work_alone(start)
        left = time
        while left > 0 and self._queue:
            shared = min(left, self._queue[0].left)
            self._work(shared, pace=2)
            left -= shared
        self._sent = self._at = max(start, self._at) + left
        return self._sent

    def launch(self, action: Action, now: float) -> None:
        if not self._is_carried(action.kind):
            super().launch(action, now)
            return
        self._work_alone(now)
        cost = self.cost[action.kind][action.chunk]
        if self._queue:
            self._queue.append(_Pending(action, cost))
        elif cost == 0:
            super().launch(action, now)
        else:
            self._at = max(self._at, now)
            self._queue.append(_Pending(action, cost))

    def _is_carried(self, kind: Kind) -> bool:
        """Whether the network card carries actions of this kind."""
        return kind in (BETWEEN_NODES if self._hierarchical else COLLECTIVES)

    def finish(self) -> None:
        while self._queue:
            self._work(self._queue[0].left)

    def _end_of(self, collective: Action) -> float | None:
        if any(pending.action == collective for pending in self._queue):
            while collective not in self._ends:
                self._work(self._queue[0].left)
        return super()._end_of(collective)

    def _work_alone(self, until: float) -> None:
        """Works the queue off while no message leaves."""
        while self._queue and self._at + self._queue[0].left <= until:
            self._work(self._queue[0].left)
        if self._queue and self._at < until:
            self._work(min(until - self._at, self._queue[0].left))

    def _work(self, work: float, pace: float = 1) -> None:
        """Works on the oldest collective, for ``pace`` times as long as ``work`` takes alone."""
        oldest = self._queue[0]
        if oldest.start is None:
            oldest.start = self._at
        oldest.left -= work
        self._at += pace * work
        if oldest.left == 0:
            self._queue.popleft()
            self._end(Span(oldest.start, self._at, oldest.action))
