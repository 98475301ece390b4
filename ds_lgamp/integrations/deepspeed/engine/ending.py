"""Finishes what living engines have under way, before process groups end."""

from collections.abc import Callable
from typing import Protocol
from weakref import WeakKeyDictionary

from ds_lgamp.checkpoint.saver import wait_for_all
from ds_lgamp.integrations.deepspeed.checkpoint.live_checkpoint import end_all


class Gathering(Protocol):
    """An engine that gathers parameters in the background."""

    def finish_gathers(self) -> None:
        """Waits until no parameters are on their way to this rank."""


_engines: WeakKeyDictionary[Gathering, None] = WeakKeyDictionary()
"""In the order in which they began, which is the same on all ranks; a set would have another order on each rank."""
_first: dict[Callable[[], None], None] = {}


def finish_at_the_end(engine: Gathering) -> None:
    """Lets :func:`finish_engines` wait for ``engine`` as long as it lives."""
    _engines[engine] = None


def first_at_the_end(agree: Callable[[], None]) -> None:
    """Lets :func:`finish_engines` call ``agree`` before it asks any engine: engines of other ranks may live longer."""
    _first[agree] = None


def finish_engines() -> None:
    """Waits for the gathers and saves that engines have under way, and ends their live states. Collective over all
    ranks; raises CheckpointError on every rank if a save failed."""
    for agree in _first:
        agree()
    for engine in _engines:
        engine.finish_gathers()
    try:
        wait_for_all()
    finally:
        # If a save has failed, live states are all that the next run can resume from.
        end_all()
