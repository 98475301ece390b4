"""The actions a program is made of, and their text form.

An action belongs to the pipeline rank of the chunk it names. ``GATHER3`` and ``REDUCE3`` launch, ``WAIT_GATHER3`` and
``WAIT_REDUCE3`` wait until that is done. ``SEND_F3.5`` sends what ``F3.5`` computed to the rank of
chunk 4, where ``RECV_F4.5`` posts its buffer; ``SEND_B3.5`` sends the gradient that ``B3.5`` computed to the rank of
chunk 2, where ``RECV_B2.5`` posts its buffer.
"""

import re
from enum import Enum
from typing import NamedTuple


class Kind(str, Enum):
    """What an action does. The value is the prefix of its text form."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    GATHER = "GATHER"
    RELEASE = "RELEASE"
    REDUCE = "REDUCE"
    WAIT_GATHER = "WAIT_GATHER"
    WAIT_REDUCE = "WAIT_REDUCE"
    STEP = "STEP"

    # Enum hashes in Python, str in C: programs of millions of actions are looked up by kind.
    __hash__ = str.__hash__


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD})
SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECV_FORWARD, Kind.RECV_BACKWARD})
COLLECTIVES = frozenset({Kind.GATHER, Kind.REDUCE})
WAITS = frozenset({Kind.WAIT_GATHER, Kind.WAIT_REDUCE})
PARTITION = COLLECTIVES | WAITS | {Kind.RELEASE}

_TEXT = re.compile(
    r"(?:(SEND_F|SEND_B|RECV_F|RECV_B|F|B)(\d+)\.(\d+)|(GATHER|RELEASE|REDUCE|WAIT_GATHER|WAIT_REDUCE)(\d+)|(STEP))"
)


class Action(NamedTuple):
    """One entry of a pipeline rank's program; ``chunk`` and ``micro_batch`` are -1 where the kind has none."""

    kind: Kind
    chunk: int = -1
    micro_batch: int = -1

    def __str__(self) -> str:
        if self.kind is Kind.STEP:
            return "STEP"
        if self.kind in PARTITION:
            return f"{self.kind.value}{self.chunk}"
        return f"{self.kind.value}{self.chunk}.{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action whose text form is ``text``; raises ValueError if there is none."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"'{text}' is no action; actions look like F3.5, SEND_B3.5, GATHER3 or STEP")
        timed, chunk, micro_batch, partition, partition_chunk, _ = match.groups()
        if timed:
            return cls(Kind(timed), int(chunk), int(micro_batch))
        if partition:
            return cls(Kind(partition), int(partition_chunk))
        return cls(Kind.STEP)


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


def awaited_by(wait: Action) -> Action:
    """The gather or reduction that ``wait`` waits for."""
    return Action(Kind.GATHER if wait.kind is Kind.WAIT_GATHER else Kind.REDUCE, wait.chunk)
