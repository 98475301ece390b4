"""Where a rank stands in its program: what it waits for, and what it has done that others may wait for.

Everything is read off the program once somebody asks, so that a step has no extra work.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

from ds_lgamp.schedule.actions import COLLECTIVES, SENDS, WAITS, Action, Kind, awaited_by, receive_of
from ds_lgamp.schedule.spec import SENDS_IN_FLIGHT

_MESSAGES = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_FORWARD, Kind.RECV_BACKWARD)
_LAUNCHES = "launches"
"""The key that counts gathers and reductions together: all data-parallel ranks launch them in the same order."""


class Neighbours(NamedTuple):
    """The ranks that a rank may wait for, by their number in the whole job."""

    previous: int
    """The rank before it in the ring of its pipeline, from which activations come."""
    following: int
    alike: tuple[int, ...]
    """The data-parallel ranks with the same chunks, itself among them."""


class Wait(NamedTuple):
    """Something that a rank waits for."""

    ranks: tuple[int, ...]
    """The ranks on which it depends; none if any rank may be meant."""
    text: str
    """What it waits for, in words."""
    what: str
    """What each of ``ranks`` must have done: a key of :attr:`Standing.done`, or the name of a call that all make."""
    times: int = -1
    """How often each must have done it in this batch; -1 if ``what`` is a call. 0 if it was begun in the batch
    before."""
    blocks: bool = False
    """Whether none of ``ranks`` leaves the call before all have entered it."""

    @property
    def is_call(self) -> bool:
        return self.times < 0


class Standing(NamedTuple):
    """Where a rank stands."""

    rank: int
    host: str
    place: str
    """In words that follow "stands": "in F7.3"."""
    batch: int
    """How many batches it has begun."""
    label: str
    """The batch, in words."""
    row: int
    """How many actions of the batch it has begun, less one."""
    inside: bool
    """Whether it is in a batch, from its data on. Otherwise it may take as long as it likes."""
    seconds: float
    """For how long it has stood there."""
    limit: float
    """How many seconds it may stand there."""
    waits: tuple[Wait, ...] = ()
    """All that it waits for; nothing if it works by itself."""
    done: dict[str, int] = {}  # noqa: RUF012 nobody changes it
    """How often it has sent, posted and launched in this batch."""
    stack: str = ""
    """The calls of its main thread."""

    def to_line(self) -> str:
        """Returns one line of text."""
        return json.dumps(self)

    @classmethod
    def from_line(cls, line: str) -> "Standing":
        """The inverse of :meth:`to_line`."""
        standing = cls(*json.loads(line))
        return standing._replace(waits=tuple(Wait(*wait)._replace(ranks=tuple(wait[0])) for wait in standing.waits))


def done_before(program: Sequence[Action], row: int) -> dict[str, int]:
    """Returns how often the actions before ``row`` send, post and launch."""
    done = dict.fromkeys([*(kind.value for kind in _MESSAGES), _LAUNCHES], 0)
    for action in program[: max(row, 0)]:
        if action.kind in _MESSAGES:
            done[action.kind.value] += 1
        elif action.kind in COLLECTIVES:
            done[_LAUNCHES] += 1
    return done


def waits_in(program: Sequence[Action], row: int, doing: str, neighbours: Neighbours) -> tuple[Wait, ...]:
    """Returns what a rank waits for that stands at ``row`` of its program.

    Args:
        row: the action; the length of the program if all are done and only sends are under way.
        doing: what the rank does inside the action: one of ``runtime.clocks``'s kinds.
        neighbours: the ranks around it.
    """
    if row >= len(program):
        return _unfinished_sends(program, row, neighbours) if doing == "send" else ()
    action = program[row]
    if doing in ("activation", "gradient"):
        return (_message(program, action, doing, neighbours),)
    if doing == "send":
        sends = action.kind in SENDS
        return (_sending(program, row, neighbours),) if sends else _unfinished_sends(program, row, neighbours)
    if action.kind in WAITS and awaited_by(action).kind in COLLECTIVES and len(neighbours.alike) > 1:
        return (_collective(program, row, neighbours),)
    return ()


def _message(program: Sequence[Action], compute: Action, doing: str, neighbours: Neighbours) -> Wait:
    post = receive_of(compute)
    number = [action for action in program if action.kind is post.kind].index(post) + 1
    forward = compute.kind is Kind.FORWARD
    peer = neighbours.previous if forward else neighbours.following
    source = Action(compute.kind, compute.chunk - 1 if forward else compute.chunk + 1, compute.micro_batch)
    sends = Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD
    return Wait((peer,), f"the {doing} that rank {peer} sends after {source}", sends.value, number)


def _sending(program: Sequence[Action], row: int, neighbours: Neighbours) -> Wait:
    """Returns the wait of a send: the receiver must take the oldest message before one more may be under way."""
    kind = program[row].kind
    sent = done_before(program, row + 1)[kind.value]
    return _taking(kind, max(1, sent - SENDS_IN_FLIGHT), neighbours)


def _unfinished_sends(program: Sequence[Action], row: int, neighbours: Neighbours) -> tuple[Wait, ...]:
    done = done_before(program, row)
    kinds = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
    return tuple(_taking(kind, done[kind.value], neighbours) for kind in kinds if done[kind.value])


def _taking(kind: Kind, number: int, neighbours: Neighbours) -> Wait:
    forward = kind is Kind.SEND_FORWARD
    peer = neighbours.following if forward else neighbours.previous
    message = "activation" if forward else "gradient"
    posts = Kind.RECV_FORWARD if forward else Kind.RECV_BACKWARD
    return Wait((peer,), f"rank {peer} to take the {message} it was sent", posts.value, number)


def _collective(program: Sequence[Action], row: int, neighbours: Neighbours) -> Wait:
    launch = awaited_by(program[row])
    begun = [place for place, action in enumerate(program[:row]) if action == launch]
    count = done_before(program, begun[-1] + 1)[_LAUNCHES] if begun else 0
    return Wait(neighbours.alike, f"{launch} with ranks {listed(neighbours.alike)}", _LAUNCHES, count)


_SHOWN = 8
"""Of how many ranks a sentence shows the numbers."""


def listed(ranks: Sequence[int]) -> str:
    """Returns the numbers of ``ranks`` in words, only the first ones if there are many."""
    numbers = ", ".join(map(str, ranks[:_SHOWN]))
    return numbers if len(ranks) <= _SHOWN else f"{numbers}, ... ({len(ranks)} in all)"
