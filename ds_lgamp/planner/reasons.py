"""Says in words why a plan wins and what limits it."""

from collections.abc import Sequence

from ds_lgamp.planner.search import Plan, best_by_method

PARTS = {
    "compute": "computing",
    "tensor_parallel": "tensor-parallel collectives",
    "bubble": "the bubble",
    "messages": "messages between pipeline ranks",
    "data_parallel": "reductions of gradients",
    "gathers": "gathers of parameters",
    "bus": "transfers between host and GPU",
    "optimizer": "the optimizer",
}
"""What the parts of a prediction are called in a sentence."""


def reasons(plans: Sequence[Plan]) -> list[str]:
    """Returns a sentence about what sets the fastest plan apart from the best plan of another method, if there is one,
    and a sentence about what limits it.

    Args:
        plans: at least one; the first is the one that is explained.
    """
    best, *others = best_by_method(plans).values()
    sentences = [_against(best, others[0])] if others else []
    return [*sentences, _limit(best)]


def _against(best: Plan, other: Plan) -> str:
    mine, theirs = best.prediction.parts, other.prediction.parts
    name = max(mine, key=lambda part: theirs[part] - mine[part])
    seconds, slower = best.prediction.seconds, other.prediction.seconds
    if slower < 0.995 * seconds:
        return f"{best.method} leads by this objective, although {other.method} takes {1 - slower / seconds:.0%} less."
    gained = 1 - seconds / slower
    if gained < 0.005:
        return f"{best.method} takes about as long as the best plan with {other.method}."
    verb = "takes" if name in ("bubble", "optimizer", "compute") else "take"
    return (
        f"{best.method} takes {gained:.0%} less time than the best plan with {other.method}, above all "
        f"because {PARTS[name]} {verb} {mine[name]:.3g} s of a step instead of {theirs[name]:.3g} s."
    )


def _limit(best: Plan) -> str:
    parts = dict(best.prediction.parts)
    compute = parts.pop("compute")
    name = max(parts, key=lambda part: parts[part])
    seconds = best.prediction.seconds
    return (
        f"A step computes for {compute / seconds:.0%} of its time, at an MFU of {best.prediction.mfu:.0%}; what costs "
        f"most beside it is {PARTS[name]} with {parts[name] / seconds:.1%}."
    )
