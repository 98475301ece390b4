"""What the model's own forward keeps in attributes, such as a counter. It runs in several parts for every micro-batch,
and each of them runs the code ahead of the blocks again. So what that sets counts once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from ds_lgamp.integrations.split.call import Call
from ds_lgamp.integrations.split.snapshot import Place, Snapshot


class OwnState:
    """The attributes of the modules whose code runs in every part of the forward.

    Args:
        modules: those modules.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self._behind: set[Place] = set()
        """What is set behind the blocks, which runs once for every micro-batch."""
        self._at_end: Snapshot | None = None

    @contextmanager
    def counted_once(self, call: Call) -> Iterator[None]:
        """Lets the attributes have the values inside the block that they had when the forward first ran for ``call`` on
        this rank. Only what that first run has set stays."""
        now = Snapshot(self.modules)
        if call.own_state is None:
            call.own_state = now
            yield
            return
        call.own_state.restore(self._behind)
        self._at_end = None
        try:
            yield
        finally:
            if self._at_end is not None:
                self._behind |= {(holder, name) for holder, name, _ in self._at_end.changed()}
            now.restore(self._behind)

    def reached_end_of_blocks(self) -> None:
        """Notes that the code behind the blocks follows."""
        self._at_end = Snapshot(self.modules)
