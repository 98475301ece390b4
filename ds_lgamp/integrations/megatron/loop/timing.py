"""Megatron-core's timers, told by the executor. Those of forward passes ``forward_step`` starts itself."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

_NAMES = {"backward": "backward-compute", "activation": "forward-recv", "gradient": "backward-recv"}
_LEVEL = 2
"""Of the timers of single passes, as in Megatron-core's schedules."""


class MegatronTiming:
    """Lets the timers of the batch that runs follow the executor."""

    timers: Any = None
    """``config.timers``; None if nobody wants to know."""

    def time(self, kind: str) -> AbstractContextManager[Any]:
        if self.timers is None or kind not in _NAMES:
            return nullcontext()
        return _running(self.timers(_NAMES[kind], log_level=_LEVEL))


@contextmanager
def _running(timer: Any) -> Iterator[None]:
    timer.start()
    try:
        yield
    finally:
        timer.stop()
