"""Tells the recorder of a step what this rank launches beside its compute, and when that is over."""

from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist


class Flight(Protocol):
    """Something that was launched. Any thread may call it."""

    def begin(self) -> None:
        """It begins only now."""

    def end(self) -> None:
        """It is over."""


class Listener(Protocol):
    """Records launches."""

    def launch(self, lane: str, moved: int) -> Flight:
        """Notes a launch of this thread.

        Args:
            lane: what it is, one of the lanes of a recording.
            moved: the bytes that it moves.
        """
        ...


listener: Listener | None = None
"""None while nobody records."""


def launched(lane: str, moved: int) -> Flight | None:
    """Notes a launch. Returns the flight to notify when it is over; None if nobody records."""
    return None if listener is None else listener.launch(lane, moved)


def ends_with(work: dist.Work, flight: Flight | None) -> None:
    """Lets ``flight`` end with a collective."""
    if flight is None:
        return
    try:
        # On an accelerator, torch calls this in a stream that follows the collective.
        work.get_future().add_done_callback(lambda _: flight.end())
    except RuntimeError:
        # Not every backend has futures. Then the wait for the collective ends the flight.
        return


def followed(function: Callable[[], Any], lane: str) -> Callable[[], Any]:
    """Returns ``function``, which another thread will call; while a step is recorded, a function that also notes begin
    and end."""
    if listener is None:
        return function
    flight = listener.launch(lane, 0)

    def noted() -> Any:
        flight.begin()
        try:
            return function()
        finally:
            flight.end()

    return noted
