"""Bytes held now and at the peak, by kind."""

from collections import Counter


class Ledger:
    """Records bytes that are taken and freed on paper."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        """The peak of each kind by itself."""
        self.most_together = 0
        """The peak of all kinds together."""

    def take(self, kind: str, amount: int) -> None:
        self.held[kind] += amount
        self.most[kind] = max(self.most[kind], self.held[kind])
        self.most_together = max(self.most_together, self.held.total())

    def free(self, kind: str, amount: int) -> None:
        self.held[kind] -= amount

    def pass_by(self, kind: str, amount: int) -> None:
        """Takes ``amount`` for a moment."""
        self.take(kind, amount)
        self.free(kind, amount)
