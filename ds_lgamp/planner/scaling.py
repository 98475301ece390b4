"""How large a batch may be, and how many tokens are read: scaling laws."""

from collections.abc import Callable

from ds_lgamp.planner.model import Model


def kaplan(model: Model) -> float:
    """Returns the critical batch in tokens by Kaplan et al., arXiv 2001.08361: B* L^(-1/0.21) with B* = 2e8, at the
    loss L = (8.8e13 / parameters)^0.076 that a model of this size reaches."""
    loss = (8.8e13 / model.parameters) ** 0.076
    return 2e8 * loss ** (-1 / 0.21)


def by_width(model: Model) -> float:
    """Returns 82 layers^(2/3) sequences, in tokens. This is a hypothesis of this project for models whose layers, heads
    and head size are one number, as in arXiv 2106.02679. At a trillion parameters it is a seventh of :func:`kaplan`."""
    return 82 * model.layers ** (2 / 3) * model.sequence_length


LAWS: dict[str, Callable[[Model], float]] = {"kaplan": kaplan, "width": by_width}


def critical_batch(model: Model, law: str) -> int:
    """Returns the critical batch in sequences: larger ones need almost proportionally more tokens (McCandlish et al.,
    arXiv 1812.06162). Raises ValueError for an unknown law."""
    if law not in LAWS:
        raise ValueError(f"law is '{law}'; use one of {', '.join(LAWS)}")
    return max(1, int(LAWS[law](model) / model.sequence_length))


def tokens_needed(tokens: float, sequences: int, critical: int) -> float:
    """Returns the tokens that training with ``sequences`` per step reads to come as far as ``tokens`` do with very
    small batches: they grow by 1 + B / B_crit (arXiv 1812.06162)."""
    return tokens * (1 + sequences / critical)
