"""Where a rank stands, as other ranks hear of it: what it waits for, and what it has done for which they may wait. Both
are read off its program."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ds_lgamp.schedule.actions import (
    COLLECTIVES,
    RECEIVES,
    SENDS,
    WAITS,
    Action,
    Kind,
    awaited_by,
    chunk_beyond,
    receive_matching,
    receive_of,
    send_matching,
)
from ds_lgamp.schedule.spec import SENDS_IN_FLIGHT

_LAUNCHES = "launches"
"""The key that counts gathers and reductions together: all data-parallel ranks launch them in the same order."""


class Neighbours(NamedTuple):
    """The ranks that a rank may wait for, by their number in the whole job."""

    owners: tuple[int, ...]
    """The rank of every chunk, in this rank's pipeline."""
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
    compiles: bool = False
    """Whether torch compiles what the rank computes."""

    def to_line(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_line(cls, line: str) -> "Standing":
        standing = cls(*json.loads(line))
        return standing._replace(waits=tuple(Wait(*wait)._replace(ranks=tuple(wait[0])) for wait in standing.waits))


def placed(place: str, inside: bool, label: str) -> str:
    """Returns words that follow "stands": the ``place`` and, if there is one, the batch that is there or was before."""
    return f"{place} {'of' if inside else 'after'} {label}" if label else place


def done_before(program: Sequence[Action], row: int, owners: Sequence[int]) -> dict[str, int]:
    """Returns how often the actions before ``row`` send and post, by kind and the rank at the other end; and how often
    they launch.

    Args:
        owners: the rank of every chunk.
    """
    done: Counter[str] = Counter()
    for action in program[: max(row, 0)]:
        if action.kind in SENDS or action.kind in RECEIVES:
            done[_channel(action.kind, owners[chunk_beyond(action)])] += 1
        elif action.kind in COLLECTIVES:
            done[_LAUNCHES] += 1
    return dict(done)


def _channel(kind: Kind, peer: int) -> str:
    """Returns the key that counts the sends or posts of one kind to or from the rank ``peer``."""
    return f"{kind.value} {peer}"


def waits_in(program: Sequence[Action], row: int, doing: str, neighbours: Neighbours) -> tuple[Wait, ...]:
    """Returns what a rank waits for that stands at ``row`` of its program.

    Args:
        row: the action; the length of the program if all are done and only sends are under way.
        doing: what the rank does inside the action: one of ``runtime.clocks``'s kinds.
        neighbours: the ranks around it.
    """
    owners = neighbours.owners
    if row >= len(program):
        return _unfinished_sends(program, row, owners) if doing == "send" else ()
    action = program[row]
    if doing in ("activation", "gradient"):
        # The first of two forwards beside each other waits for the inputs of both.
        before = program[row - 1] if doing == "activation" and row > 0 else action
        beside = [before._replace(kind=Kind.FORWARD)] if before.kind is Kind.START_FORWARD else []
        return tuple(_message(program, compute, doing, owners) for compute in (action, *beside))
    if doing == "send":
        if action.kind not in SENDS:
            return _unfinished_sends(program, row, owners)
        # The receiver must take the oldest message before one more may be under way.
        return (_taking(action, max(1, _number(program[: row + 1], action, owners) - SENDS_IN_FLIGHT), owners),)
    if action.kind in WAITS and awaited_by(action).kind in COLLECTIVES and len(neighbours.alike) > 1:
        return (_collective(program, row, neighbours),)
    return ()


def _message(program: Sequence[Action], compute: Action, doing: str, owners: Sequence[int]) -> Wait:
    post = receive_of(compute)
    number = _number(program[: program.index(post) + 1], post, owners)
    send, peer = send_matching(post), owners[chunk_beyond(post)]
    source = Action(compute.kind, send.chunk, compute.micro_batch)
    text = f"the {doing} that rank {peer} sends after {source}"
    return Wait((peer,), text, _channel(send.kind, owners[post.chunk]), number)


def _number(actions: Sequence[Action], message: Action, owners: Sequence[int]) -> int:
    """Returns how many of ``actions`` are of the kind and link of ``message``."""
    done = done_before(actions, len(actions), owners)
    return done[_channel(message.kind, owners[chunk_beyond(message)])]


def _unfinished_sends(program: Sequence[Action], row: int, owners: Sequence[int]) -> tuple[Wait, ...]:
    last = {(each.kind, owners[chunk_beyond(each)]): each for each in program[:row] if each.kind in SENDS}
    return tuple(_taking(send, _number(program[:row], send, owners), owners) for send in last.values())


def _taking(send: Action, number: int, owners: Sequence[int]) -> Wait:
    """Returns the wait for the receiver to take the first ``number`` messages of the kind and link of ``send``."""
    post, message = receive_matching(send), "activation" if send.kind is Kind.SEND_FORWARD else "gradient"
    peer = owners[post.chunk]
    return Wait(
        (peer,), f"rank {peer} to take the {message} it was sent", _channel(post.kind, owners[send.chunk]), number
    )


def _collective(program: Sequence[Action], row: int, neighbours: Neighbours) -> Wait:
    launch = awaited_by(program[row])
    begun = [place for place, action in enumerate(program[:row]) if action == launch]
    count = done_before(program, begun[-1] + 1, neighbours.owners)[_LAUNCHES] if begun else 0
    return Wait(neighbours.alike, f"{launch} with ranks {listed(neighbours.alike)}", _LAUNCHES, count)


_SHOWN = 8
"""Of how many ranks a sentence shows the numbers."""


def listed(ranks: Sequence[int]) -> str:
    """Returns the numbers of ``ranks`` in words, only the first ones if there are many."""
    numbers = ", ".join(map(str, ranks[:_SHOWN]))
    return numbers if len(ranks) <= _SHOWN else f"{numbers}, ... ({len(ranks)} in all)"
