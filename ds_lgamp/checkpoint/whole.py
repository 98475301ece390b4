"""A checkpoint in one process."""

from typing import Any, NamedTuple

from torch import Tensor


class WholeCheckpoint(NamedTuple):
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    client_state: dict[str, Any]
