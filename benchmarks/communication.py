"""Counts the collectives and bytes that one step sends on a rank, at dispatch: ``python -m benchmarks run
communication``.

Every contender trains the same model with one block per chunk and recomputes blocks. ds_lgamp runs through
``deepspeed.initialize``. Each of its counts is compared with the formulas of ``ds_lgamp/cost/traffic.py``.
"""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.contenders import Layout
from benchmarks.contenders.field import ours, peers
from benchmarks.contenders.formula import LAYOUTS, program_of
from benchmarks.counting import Counted, Step, count
from benchmarks.model import ModelSize
from benchmarks.record import OURS, REPETITIONS, Record, begin
from ds_lgamp.cost.traffic import collective_bytes, predict_traffic
from ds_lgamp.cost.units import ElementBytes, Sharding

NAME = "communication"
SIZE = ModelSize()
MICRO_BATCHES = (1, 4, 8, 32)
REDUCTIONS = {"all_to_all", "reduce_scatter", "all_reduce", "reduce"}
SMALL_BYTES = 128
"""Collectives of up to this many bytes do not count. They carry the norm, the loss or, in ds_lgamp, ten numbers that
say whether all ranks have data and do the same, and no parameters or gradients."""


class Moved(NamedTuple):
    """Traffic of one step on one rank."""

    gathers: int
    reductions: int
    collective_bytes: int
    messages: int
    message_bytes: int


def run(
    size: ModelSize = SIZE,
    layouts: Sequence[tuple[int, int]] = LAYOUTS,
    micro_batches: Sequence[int] = MICRO_BATCHES,
    repetitions: int = REPETITIONS,
) -> Record:
    """Counts every contender in every layout, for every number of micro-batches per step."""
    record = begin(NAME)
    deviations = 0
    for pipeline_ranks, data_ranks in layouts:
        layout = Layout(pipeline_ranks, data_ranks, size)
        own = ours(layout)
        contenders = [*own.values(), *peers(layout)]
        counted = count(contenders, layout, micro_batches, repetitions=repetitions)
        for name, on_ranks in counted.items():
            _enter(record, name, layout, on_ranks)
        for (stage, resident), contender in own.items():
            deviations += count_deviations(counted[contender.name], layout, stage, resident)
    record.aim("counts of ds_lgamp that differ from the formula", deviations, 0)
    compare(record)
    return record


def moved(step: Step) -> Moved:
    """Sorts the counted calls of a step into gathers, reductions and messages."""
    messages = [amount for kind, amount in step.log if kind == "send"]
    large = [(kind, amount) for kind, amount in step.log if kind != "send" and amount > SMALL_BYTES]
    return Moved(
        gathers=sum(kind == "all_gather" for kind, _ in large),
        reductions=sum(kind in REDUCTIONS for kind, _ in large),
        collective_bytes=sum(amount for _, amount in large),
        messages=len(messages),
        message_bytes=sum(messages),
    )


def predicted(
    layout: Layout,
    rank: int,
    micro_batches: int,
    zero_stage: int,
    resident_chunks: int,
    micro_batch_group: int | None = None,
) -> Moved:
    """The formulas' traffic of a step on a global rank."""
    actions, units = program_of(layout, rank, micro_batches, zero_stage, resident_chunks, micro_batch_group)
    traffic = predict_traffic(actions, zero_stage, [chunk for unit in units for chunk in unit.chunks], [])
    size, element = layout.size, ElementBytes()
    return Moved(
        traffic.gathers,
        traffic.reduces,
        sum(collective_bytes(actions, unit, Sharding(zero_stage, layout.data_ranks), element) for unit in units),
        traffic.sends,
        traffic.sends * element.weights * size.samples * size.sequence * size.width,
    )


def count_deviations(on_ranks: Sequence[Counted], layout: Layout, zero_stage: int, resident_chunks: int) -> int:
    """Returns how many counts of ds_lgamp differ from the formula, over ranks, steps and kinds.

    At stage 3 this includes a check of the number of held chunks against ``resident_chunks``.
    """
    deviations = 0
    for rank, counted in enumerate(on_ranks):
        for micro_batches, steps in counted.steps.items():
            right = predicted(layout, rank, micro_batches, zero_stage, resident_chunks)
            held = min(resident_chunks, layout.chunks_per_rank) if zero_stage == 3 else layout.chunks_per_rank
            deviations += counted.held[micro_batches] != held
            deviations += sum(found != expected for step in steps for found, expected in zip(moved(step), right))
    return deviations


def _enter(record: Record, name: str, layout: Layout, on_ranks: Sequence[Counted]) -> None:
    """Enters the rows of one contender. A sample is the largest count of any rank in a step."""
    for micro_batches in on_ranks[0].steps:
        config = layout.config(micro_batches)
        repetitions = list(zip(*(counted.steps[micro_batches] for counted in on_ranks)))
        for metric in Moved._fields:
            samples = [max(getattr(moved(step), metric) for step in steps) for steps in repetitions]
            record.add(name, config, metric, samples, "bytes" if "bytes" in metric else "count")
        record.add(name, config, "held", [max(counted.held[micro_batches] for counted in on_ranks)], "chunks")


def compare(record: Record) -> None:
    """Compares each peer with ds_lgamp at stage 3, where that holds at most as many chunks."""
    found = {(row.contender, tuple(row.config.items()), row.metric): row.median for row in record.rows}
    less = 0
    for (name, config, metric), theirs in found.items():
        if metric == "collective_bytes" and not name.startswith(OURS):
            own = min(
                value
                for (other, where, kind), value in found.items()
                if other.startswith(f"{OURS}, ZeRO-3") and where == config and kind == metric
                if found[other, where, "held"] <= found[name, config, "held"]
            )
            less += theirs < own
    record.aim("rows of peers that send less than ds_lgamp with as many chunks held, or fewer", less, 0)
