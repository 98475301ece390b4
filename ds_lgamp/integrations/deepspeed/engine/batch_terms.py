"""What all ranks must agree on ahead of each batch."""

from typing import Any

from ds_lgamp.partition.agreement import Term, Terms


def batch_terms(engine: Any, call: str | None = None, micro_batches: int | None = None) -> Terms:
    """Returns the terms of the next batch of ``engine``.

    Args:
        call: the method that the script calls; None if ranks agree on it otherwise.
        micro_batches: their number; None if it is not known yet.
    """
    terms = {}
    if call is not None:
        terms["the call"] = Term(f"engine.{call}", "let all ranks call the same")
    if micro_batches is not None:
        terms["the number of micro-batches"] = Term(str(micro_batches), "set the same batch size on every rank")
    terms["the number of steps so far"] = Term(str(engine.global_steps), "load the same checkpoint on every rank")
    # A rate on the device stays there, because reading it would make the host wait.
    rates = [rate for rate in engine.get_lr() if isinstance(rate, (int, float))]
    terms["the learning rate"] = Term(", ".join(map(repr, rates)), "set the same one on every rank")
    return terms
