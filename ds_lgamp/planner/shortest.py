"""The shortest time to train a model, however many GPUs that takes: the critical batch limits how many can help.

No training is faster than a pipeline of as many ranks as layers with one micro-batch, but its GPUs are idle most of the
time. So at least ``BUSY`` of the GPUs' time must be compute.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil

from ds_lgamp.planner.candidates import Bound, chunks_per_rank, divisors, tensor_rank_numbers
from ds_lgamp.planner.cluster import Cluster
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.memory import fits, memory
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.predict import predict
from ds_lgamp.planner.search import Plan
from ds_lgamp.schedule.closed_form import Shape, step_time
from ds_lgamp.schedule.costs import Durations


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


BUSY = 0.5
DAY = 86400
MICRO_BATCHES = (1, 2, 4)
"""Sequences of a micro-batch. Large ones leave fewer of them."""


@dataclass(frozen=True)
class Shortest:
    """The fastest way of one method to read the tokens."""

    plan: Plan
    days: float


def shortest(model: Model, cluster: Cluster, tokens: float, law: str) -> dict[str, Shortest]:
    """Returns the shortest training by schedule, for a batch of at most the critical one and for as many nodes of
    ``cluster`` as help.

    Args:
        tokens: what training with very small batches would read.
        law: the scaling law of the critical batch.
    """
    limit, bounds = critical_batch(model, law), Bound(model, cluster)
    found: dict[str, Shortest] = {}
    for configuration in _candidates(model, cluster, limit):
        name = configuration.schedule
        read = tokens_needed(tokens, configuration.sequences, limit)
        steps = read / configuration.sequences / model.sequence_length
        if name in found and steps * bounds.seconds(configuration) >= found[name].days * DAY:
            continue
        nodes = replace(cluster, nodes=ceil(configuration.gpus / cluster.gpus_per_node))
        prediction = predict(model, nodes, configuration)
        days = steps * prediction.seconds / DAY
        if prediction.compute < BUSY * prediction.seconds or (name in found and days >= found[name].days):
            continue
        if fits(model, configuration, cluster):
            found[name] = Shortest(Plan(configuration, prediction, memory(model, configuration), None), days)
    return found


def _candidates(model: Model, cluster: Cluster, limit: int) -> Iterator[Configuration]:
    """Yields stock pipelines at ZeRO-1 and layered ones at ZeRO-3 whose batch is close below ``limit``."""
    for tensor_ranks in tensor_rank_numbers(model, cluster):
        for pipeline_ranks in divisors(model.layers):
            for micro_batch in MICRO_BATCHES:
                for data_ranks in _different_quotients(limit // micro_batch):
                    plain = Configuration(
                        data_ranks=data_ranks,
                        pipeline_ranks=pipeline_ranks,
                        tensor_ranks=tensor_ranks,
                        micro_batch=micro_batch,
                        micro_batches=limit // micro_batch // data_ranks,
                        zero_stage=1 if data_ranks > 1 else 0,
                    )
                    if _busy(plain):
                        yield plain
                    for chunks in chunks_per_rank(model, pipeline_ranks):
                        several = replace(plain, chunks_per_rank=chunks)
                        if not _busy(several):
                            continue
                        if 1 < chunks and 1 < pipeline_ranks and plain.micro_batches % pipeline_ranks == 0:
                            yield replace(several, schedule="interleaved_1f1b")
                        yield replace(several, schedule="layered", zero_stage=3 if data_ranks > 1 else 0)


def _busy(configuration: Configuration) -> bool:
    """Whether the bubble alone leaves enough of the step for compute."""
    of = configuration
    # Without messages, the other pipelines take as long as the layered one.
    step = step_time(Shape("layered", of.pipeline_ranks, of.chunks_per_rank, of.micro_batches), _COMPUTE_ALONE)
    return of.chunks_per_rank * of.micro_batches >= BUSY * step


_COMPUTE_ALONE = Durations(forward=1.0, backward=0.0)


def _different_quotients(number: int) -> list[int]:
    """Returns numbers from 1 to ``number`` in steps of about a tenth, each the largest with its quotient in a whole
    division of ``number``."""
    found, divisor = [], 1
    while divisor <= number:
        divisor = number // (number // divisor)
        found.append(divisor)
        divisor = max(divisor + 1, ceil(1.1 * divisor))
    return found
