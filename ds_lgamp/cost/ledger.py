"""Bytes held now and at the peak, by kind."""

from collections import defaultdict
from collections.abc import Callable

from ds_lgamp.schedule.actions import Action

Step = Callable[[Action], None]
"""Takes and frees what an action takes and frees."""


class Ledger:
    """Records bytes that are taken and freed on paper."""

    def __init__(self) -> None:
        self.held: defaultdict[str, int] = defaultdict(int)
        self.together = 0
        """What is held, of all kinds together."""
        self.most: defaultdict[str, int] = defaultdict(int)
        """The peak of each kind by itself."""
        self.most_together = 0
        """The peak of all kinds together."""
        self._is_at_peak = False
        self._held_at_peak: dict[str, int] = {}

    @property
    def at_peak(self) -> dict[str, int]:
        """What is held of each kind at the peak of all kinds together."""
        return dict(self.held) if self._is_at_peak else self._held_at_peak

    def take(self, kind: str, amount: int) -> None:
        held = self.held[kind] = self.held[kind] + amount
        if held > self.most[kind]:
            self.most[kind] = held
        self.together += amount
        if self.together > self.most_together:
            self.most_together = self.together
            self._is_at_peak = True

    def free(self, kind: str, amount: int) -> None:
        if self._is_at_peak and amount:
            self._held_at_peak, self._is_at_peak = dict(self.held), False
        self.held[kind] -= amount
        self.together -= amount

    def pass_by(self, kind: str, amount: int) -> None:
        """Takes ``amount`` for a moment."""
        self.take(kind, amount)
        self.free(kind, amount)
