"""What came of the cases of a fuzz run."""

from collections import Counter
from typing import NamedTuple

SHOWN = 20
"""Defects that are printed."""


class Outcome(NamedTuple):
    """What came of one case."""

    kind: str
    """What it did, such as "refused". A defect begins with "defect"."""
    text: str = ""
    """Of a defect: what was fed, and what happened; of a refusal: the sentence, if it counts."""


class Tally:
    """Counts outcomes, and keeps the defects."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.defects: list[str] = []
        self.refusals: Counter[str] = Counter()

    def add(self, case: int, outcome: Outcome) -> None:
        self.kinds[outcome.kind] += 1
        if outcome.kind == "refused" and outcome.text:
            self.refusals[outcome.text] += 1
        if outcome.kind.startswith("defect"):
            self.defects.append(f"case {case}: {outcome.kind}: {outcome.text}")

    def text(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
        shown = self.defects[:SHOWN]
        more = len(self.defects) - len(shown)
        refusals = [f"{count} x {sentence}" for sentence, count in self.refusals.most_common()]
        return "\n".join([counts, *refusals, *shown, *([f"and {more} more defects"] if more else [])])


def sentence_fault(text: str) -> str | None:
    """Returns why ``text`` is no refusal that a user can act on; None if it is one: a sentence in one line."""
    if not text.strip():
        return "it is empty"
    if "\n" in text.strip():
        return "it has several lines"
    if "Traceback" in text:
        return "it holds a traceback"
    return None
