"""Tells the recorder of a step what this rank launches beside its compute, and when that is over."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ds_lgamp.watch.this_rank import Flight, this_rank


def launched(lane: str, moved: int) -> Flight | None:
    """Notes a launch. Returns the flight to notify when it is over; None if nobody records."""
    recorder = this_rank.recorder
    return None if recorder is None else recorder.launch(lane, moved)


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
    flight = launched(lane, 0)
    if flight is None:
        return function

    def noted() -> Any:
        flight.begin()
        try:
            return function()
        finally:
            flight.end()

    return noted
