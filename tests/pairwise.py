"""Selects a few cases instead of a full product of factors."""

import random
from itertools import combinations


def pairwise(cases: list[dict]) -> list[dict]:
    """Selects few of ``cases`` that together hold every pair of values of two factors. Takes the case with most new
    pairs first."""
    cases = list(cases)
    random.Random(0).shuffle(cases)

    def pairs(case):
        return set(combinations(case.items(), 2))

    missing = set().union(*map(pairs, cases))
    chosen = []
    while missing:
        candidates = random.Random(len(chosen)).sample(cases, min(200, len(cases))) if len(missing) > 60 else cases
        best = max(candidates, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen
