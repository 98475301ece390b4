"""Logits of routers, which models of transformers collect by hooks for the loss that balances their experts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

_KEY = "router_logits"


class RouterLogits:
    """Records the logits of routers."""

    def __init__(self) -> None:
        # Here, because importing transformers takes seconds, and only its models need it.
        from transformers.utils.output_capturing import _active_collector

        self._collector = _active_collector

    def records(self) -> bool:
        return _KEY in (self._collector.get() or ())

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        recorded: list[Tensor] = []
        token = self._collector.set({_KEY: recorded})
        try:
            yield recorded
        finally:
            self._collector.reset(token)

    def give(self, made: list[Tensor]) -> None:
        self._collector.get()[_KEY].extend(made)

    def reduces(self, arguments: Any) -> bool:
        return False

    def reduced(self, arguments: Any, carried: Sequence[Tensor], made: list[Tensor]) -> list[Tensor]:
        raise NotImplementedError

    @contextmanager
    def needing_only(self, carried: Sequence[Tensor]) -> Iterator[None]:
        yield
