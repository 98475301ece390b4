"""The actions of a program, and their text form.

Each action runs on the pipeline rank that owns its chunk. ``GATHER3`` and ``REDUCE3`` launch a collective;
``WAIT_GATHER3`` and ``WAIT_REDUCE3`` wait for it. With hierarchical shards these two stay inside a node. ``REFRESH3``
then brings the updated parts of the node's shard from other nodes, and ``COMBINE3`` sums over the nodes what
``REDUCE3`` summed inside each; ``WAIT_REFRESH3`` and ``WAIT_COMBINE3`` wait for them.

``UPDATE3`` is the optimizer's update of one chunk, where ``STEP`` does not update all. With offloading, it runs on the
host, beside the program. Once it is over, ``LOAD3`` copies this rank's part of the weights from the host to the device;
``STORE3`` copies the gradient back. ``WAIT_LOAD3`` and ``WAIT_STORE3`` wait for them. ``STORE_A3.5`` takes the input of
``F3.5`` to the host and ``LOAD_A3.5`` brings it back for ``B3.5``; they have waits, too. So have ``STORE_W3``, which
copies the weights of chunk 3 that a gather has brought to the host, and ``LOAD_W3``, which brings them back instead of
a later gather. ``SEND_F3.5`` sends the result
of ``F3.5`` to the rank of chunk 4, where ``RECV_F4.5`` posts the receive. ``SEND_B3.5`` sends the gradient that
``B3.5`` computed to the rank of chunk 2, where ``RECV_B2.5`` posts the receive.

Where exchanges overlap, ``START_F3.6`` begins ``F3.6`` beside ``F3.5``, which follows: while the tokens of one travel
among ranks that divide experts, the other computes. ``F3.6`` then computes what is left of it. ``START_B3.6`` begins
the forward that ``B3.6`` repeats beside that of ``B3.5``.

Where backwards have two parts, ``B3.5`` computes the gradient of the chunk's input, which other ranks wait for, and
``W3.5`` later those of weights that matrix products read (zero bubble, arXiv 2401.10241).

``RETURN2`` returns the outputs of call 2 to a script that computes the loss itself. The script goes on when all
pipeline ranks have reached it.
"""

import re
from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple


class Kind(str, Enum):
    """The kind of an action. Its value is the prefix of the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHTS_BACKWARD = "W"
    START_FORWARD = "START_F"
    START_BACKWARD = "START_B"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    GATHER = "GATHER"
    RELEASE = "RELEASE"
    REDUCE = "REDUCE"
    REFRESH = "REFRESH"
    COMBINE = "COMBINE"
    WAIT_GATHER = "WAIT_GATHER"
    WAIT_REDUCE = "WAIT_REDUCE"
    WAIT_REFRESH = "WAIT_REFRESH"
    WAIT_COMBINE = "WAIT_COMBINE"
    LOAD = "LOAD"
    STORE = "STORE"
    WAIT_LOAD = "WAIT_LOAD"
    WAIT_STORE = "WAIT_STORE"
    STORE_INPUT = "STORE_A"
    LOAD_INPUT = "LOAD_A"
    WAIT_STORE_INPUT = "WAIT_STORE_A"
    WAIT_LOAD_INPUT = "WAIT_LOAD_A"
    STORE_WEIGHTS = "STORE_W"
    LOAD_WEIGHTS = "LOAD_W"
    WAIT_STORE_WEIGHTS = "WAIT_STORE_W"
    WAIT_LOAD_WEIGHTS = "WAIT_LOAD_W"
    UPDATE = "UPDATE"
    RETURN = "RETURN"
    STEP = "STEP"

    # Programs have millions of actions and look each one up by kind. str hashes in C, Enum in slower Python.
    __hash__ = str.__hash__


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD})
"""Computes that need what another compute makes, and that visit a chunk. The second part of a backward needs neither
messages nor weights."""
STARTED = {Kind.START_FORWARD: Kind.FORWARD, Kind.START_BACKWARD: Kind.BACKWARD}
"""The kind of compute that each kind of start begins beside the compute before it."""
STARTS = {compute: start for start, compute in STARTED.items()}
SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECV_FORWARD, Kind.RECV_BACKWARD})
AWAITED = {
    Kind.WAIT_GATHER: Kind.GATHER,
    Kind.WAIT_REDUCE: Kind.REDUCE,
    Kind.WAIT_REFRESH: Kind.REFRESH,
    Kind.WAIT_COMBINE: Kind.COMBINE,
    Kind.WAIT_LOAD: Kind.LOAD,
    Kind.WAIT_STORE: Kind.STORE,
    Kind.WAIT_STORE_INPUT: Kind.STORE_INPUT,
    Kind.WAIT_LOAD_INPUT: Kind.LOAD_INPUT,
    Kind.WAIT_STORE_WEIGHTS: Kind.STORE_WEIGHTS,
    Kind.WAIT_LOAD_WEIGHTS: Kind.LOAD_WEIGHTS,
}
"""The kind of action that each kind of wait waits for."""
COLLECTIVES = frozenset({Kind.GATHER, Kind.REDUCE, Kind.REFRESH, Kind.COMBINE})
WAITS = frozenset(AWAITED)
OF_INPUTS = frozenset({Kind.STORE_INPUT, Kind.LOAD_INPUT, Kind.WAIT_STORE_INPUT, Kind.WAIT_LOAD_INPUT})
"""What storing the inputs of chunks on the host adds to a program."""
NEAREST = 3
"""How many computes a backward must be after its forward for the input to leave: one covers the way to the host,
another the way back. The script's turn in between is enough."""
OF_WEIGHTS = frozenset({Kind.STORE_WEIGHTS, Kind.LOAD_WEIGHTS, Kind.WAIT_STORE_WEIGHTS, Kind.WAIT_LOAD_WEIGHTS})
"""What storing gathered weights on the host adds to a program."""
TRANSFERS = frozenset({Kind.LOAD, Kind.STORE, Kind.STORE_INPUT, Kind.LOAD_INPUT, Kind.STORE_WEIGHTS, Kind.LOAD_WEIGHTS})
"""Copies between host and device."""
BETWEEN_NODES = frozenset({Kind.REFRESH, Kind.COMBINE})
"""Collectives of hierarchical shards that travel between nodes."""
PARTITION = (COLLECTIVES | TRANSFERS | WAITS | {Kind.RELEASE, Kind.UPDATE}) - OF_INPUTS

_TEXT = re.compile(
    r"(?:(START_F|START_B|SEND_F|SEND_B|RECV_F|RECV_B|(?:WAIT_)?(?:STORE|LOAD)_A|F|B|W)(\d+)\.(\d+)"
    r"|(RELEASE|(?:WAIT_)?(?:GATHER|REDUCE|REFRESH|COMBINE|(?:LOAD|STORE)(?:_W)?)|UPDATE)(\d+)"
    r"|RETURN(\d+)|(STEP))"
)


class Action(NamedTuple):
    """One entry of a pipeline rank's program. ``chunk`` and ``micro_batch`` are -1 if the kind has none. The
    ``micro_batch`` of RETURN is the number of a call."""

    kind: Kind
    chunk: int = -1
    micro_batch: int = -1
    recomputed: bool = False
    """Of a forward and of its backward, both parts if it has two: whether the backward computes the chunk again. The
    text form leaves it out."""
    selective: bool = False
    """Of a compute that is not recomputed: whether its layers recompute a part of themselves. The text form leaves it
    out, too."""

    def __str__(self) -> str:
        if self.kind is Kind.STEP:
            return "STEP"
        if self.kind is Kind.RETURN:
            return f"RETURN{self.micro_batch}"
        if self.kind in PARTITION:
            return f"{self.kind.value}{self.chunk}"
        return f"{self.kind.value}{self.chunk}.{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Parses the text form of an action, which does not say whether a compute is ``recomputed``. Raises ValueError
        if ``text`` is not an action."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"'{text}' is no action; actions look like F3.5, SEND_B3.5, GATHER3 or STEP")
        timed, chunk, micro_batch, partition, partition_chunk, call, _ = match.groups()
        if timed:
            return cls(Kind(timed), int(chunk), int(micro_batch))
        if partition:
            return cls(Kind(partition), int(partition_chunk))
        if call:
            return cls(Kind.RETURN, micro_batch=int(call))
        return cls(Kind.STEP)


Program = list[list[Action]]
"""The actions of every pipeline rank."""
Segments = list[list[Action]]
"""The actions of one pipeline rank while passes add to them: those up to each turn of the script, and those after the
last one. All backwards are in the last segment."""


def joined(segments: Segments) -> list[Action]:
    """Returns the actions of all segments, with RETURN between them."""
    actions = list(segments[0])
    for call, segment in enumerate(segments[1:]):
        actions.append(Action(Kind.RETURN, micro_batch=call))
        actions.extend(segment)
    return actions


def send_of(compute: Action) -> Action:
    """Returns the action that sends the result of ``compute``."""
    kind = Kind.SEND_FORWARD if compute.kind is Kind.FORWARD else Kind.SEND_BACKWARD
    return Action(kind, compute.chunk, compute.micro_batch)


def receive_of(compute: Action) -> Action:
    """Returns the action that posts the receive for the input of ``compute``."""
    kind = Kind.RECV_FORWARD if compute.kind is Kind.FORWARD else Kind.RECV_BACKWARD
    return Action(kind, compute.chunk, compute.micro_batch)


def receive_matching(send: Action) -> Action:
    """Returns the action that posts the receive for ``send`` on the other rank."""
    if send.kind is Kind.SEND_FORWARD:
        return Action(Kind.RECV_FORWARD, send.chunk + 1, send.micro_batch)
    return Action(Kind.RECV_BACKWARD, send.chunk - 1, send.micro_batch)


def send_matching(receive: Action) -> Action:
    """Returns the action that sends the message of ``receive`` on the other rank."""
    if receive.kind is Kind.RECV_FORWARD:
        return Action(Kind.SEND_FORWARD, receive.chunk - 1, receive.micro_batch)
    return Action(Kind.SEND_BACKWARD, receive.chunk + 1, receive.micro_batch)


def chunk_beyond(message: Action) -> int:
    """Returns the chunk at the other end of a SEND or RECV."""
    return message.chunk + (1 if message.kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD) else -1)


def awaited_by(wait: Action) -> Action:
    """Returns the action that ``wait`` waits for."""
    return Action(AWAITED[wait.kind], wait.chunk, wait.micro_batch)


def each_action(segments: Segments, lower: Callable[[Action], Iterable[Action]]) -> Segments:
    """Returns the segments with what ``lower`` makes of each action, in the order of the program."""
    return [[lowered for action in segment for lowered in lower(action)] for segment in segments]


def computes_of(actions: Iterable[Action]) -> list[Action]:
    """Returns the forwards and backwards among ``actions``."""
    return [action for action in actions if action.kind in COMPUTE]
