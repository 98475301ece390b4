"""Runs Megatron-core's timers around the executor's work. ``forward_step`` runs those of forward passes itself."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

_NAMES = {"backward": "backward-compute", "activation": "forward-recv", "gradient": "backward-recv"}
_LEVEL = 2
"""The log level of timers of single passes, as in Megatron-core's schedules."""


class MegatronTiming:
    """Times the executor's work with the timers of the batch that runs."""

    timers: Any = None
    """``config.timers``; None times nothing."""

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
