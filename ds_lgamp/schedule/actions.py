"""The actions a program is made of, and their text form.

An action belongs to the pipeline rank of the chunk it names. ``SEND_F3.5`` sends what ``F3.5`` computed to the rank of
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
    STEP = "STEP"

    # Enum hashes in Python, str in C: programs of millions of actions are looked up by kind.
    __hash__ = str.__hash__


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD})
SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECV_FORWARD, Kind.RECV_BACKWARD})
PARTITION = frozenset({Kind.GATHER, Kind.RELEASE, Kind.REDUCE})

_TEXT = re.compile(r"(?:(SEND_F|SEND_B|RECV_F|RECV_B|F|B)(\d+)\.(\d+)|(GATHER|RELEASE|REDUCE)(\d+)|(STEP))")


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
