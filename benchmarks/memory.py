"""Measures peak bytes of live tensors on a rank in one step, at dispatch: ``python -m benchmarks run memory``.

ds_lgamp runs through ``deepspeed.initialize`` and is compared with the formula of ``ds_lgamp/cost/memory.py``. The
formula's inputs include the bytes of one micro-batch on a chunk. They are measured on a single block in one process.
"""

import statistics
from collections.abc import Sequence
from functools import cache

import torch

from benchmarks.contenders import Layout
from benchmarks.contenders.field import ours, peers
from benchmarks.contenders.formula import LAYOUTS, program_of
from benchmarks.counting import Counted, count
from benchmarks.model import Block, ModelSize, loss_function, micro_batch
from benchmarks.record import REPETITIONS, Record, begin
from ds_lgamp.cost.activations import ActivationBytes, ChunkBytes
from ds_lgamp.cost.memory import Memory, rank_memory
from ds_lgamp.cost.units import ElementBytes, Sharding
from ds_lgamp.integrations.deepspeed.explain.activations import Way, chunk_bytes
from ds_lgamp.runtime.recompute import default_sources, read_states

NAME = "memory"
SIZE = ModelSize()
MICRO_BATCHES = (1, 8)
LARGEST_DEVIATION = 0.01
ADAMW = ElementBytes(weights=4, gradients=4, optimizer=8)
"""Fused AdamW in fp32: two moments and no temporary tensors."""


def run(
    size: ModelSize = SIZE,
    layouts: Sequence[tuple[int, int]] = LAYOUTS,
    micro_batches: Sequence[int] = MICRO_BATCHES,
    repetitions: int = REPETITIONS,
) -> Record:
    """Measures every contender in every layout, for every number of micro-batches per step."""
    record = begin(NAME)
    deviation = 0.0
    for pipeline_ranks, data_ranks in layouts:
        layout = Layout(pipeline_ranks, data_ranks, size)
        own = ours(layout)
        contenders = [*own.values(), *peers(layout)]
        counted = count(contenders, layout, micro_batches, memory=True, repetitions=repetitions)
        for name, on_ranks in counted.items():
            enter(record, name, layout, on_ranks)
        for (stage, resident), contender in own.items():
            for number in micro_batches:
                on_ranks = counted[contender.name]
                formula = [predicted(layout, rank, number, stage, resident).peak for rank in range(len(on_ranks))]
                record.add(contender.name, layout.config(number), "formula", [max(formula)], "bytes")
                deviation = max(deviation, largest_deviation(on_ranks, number, formula))
    record.aim("largest |measured - formula| / formula of ds_lgamp", deviation, LARGEST_DEVIATION)
    return record


def predicted(
    layout: Layout,
    rank: int,
    micro_batches: int,
    zero_stage: int,
    resident_chunks: int,
    recompute: bool = True,
    micro_batch_group: int | None = None,
) -> Memory:
    """The formula's memory of a global rank."""
    actions, units = program_of(layout, rank, micro_batches, zero_stage, resident_chunks, micro_batch_group, recompute)
    activations = activation_bytes(layout.size, recompute)
    # The benchmark runs on gloo, where an all-to-all replaces the reduce-scatter.
    return rank_memory(actions, units, Sharding(zero_stage, layout.data_ranks, all_to_all=True), ADAMW, activations)


@cache
def activation_bytes(size: ModelSize, recompute: bool = True) -> ActivationBytes:
    """Measures the first, the second and the last block, each alone.

    The last block runs its backward right after its forward, so it is never recomputed.
    """
    inputs, labels = micro_batch(size, 0, 0)
    first, middle, last = (
        bytes_of_block(size, is_first, is_last, recompute and not is_last)
        for is_first, is_last in ((True, False), (False, False), (False, True))
    )
    states = read_states(default_sources(inputs.device))
    return ActivationBytes(
        inputs.nbytes,
        labels.nbytes,
        [first, *[middle] * (size.blocks - 2), last],
        sum(state.nbytes for state in states),
    )


def bytes_of_block(size: ModelSize, is_first: bool, is_last: bool, recompute: bool) -> ChunkBytes:
    """Measures a micro-batch on one block without ranks, chunks or a schedule."""
    block = Block(0, size)
    hidden, labels = micro_batch(size, 0, 0)
    gradient = torch.ones(()) if is_last else torch.ones_like(hidden)
    parameters = list(block.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)

    def compute(inputs: torch.Tensor) -> torch.Tensor:
        return loss_function(block(inputs), labels) if is_last else block(inputs)

    existing = [labels, *parameters, *(parameter.grad for parameter in parameters)]
    handed_on = 0 if is_last else hidden.nbytes
    return chunk_bytes(compute, hidden, [gradient], existing, handed_on, is_first, Way(recompute))


def largest_deviation(on_ranks: Sequence[Counted], micro_batches: int, formula: Sequence[int]) -> float:
    """The largest relative deviation of the measured peaks from the formula."""
    return max(
        abs(typical_peak(counted, micro_batches) - expected) / expected
        for counted, expected in zip(on_ranks, formula, strict=True)
    )


def typical_peak(counted: Counted, micro_batches: int) -> float:
    """The median peak of all steps. In some steps gloo's threads free a tensor only after its collective was
    awaited."""
    return statistics.median(step.peak_bytes for step in counted.steps[micro_batches])


def enter(record: Record, name: str, layout: Layout, on_ranks: Sequence[Counted], **config: str) -> None:
    """Enters the rows of one contender. A sample is the largest peak of any rank in a step; ``config`` is added to the
    layout's."""
    for micro_batches in on_ranks[0].steps:
        repetitions = zip(*(counted.steps[micro_batches] for counted in on_ranks))
        samples = [max(step.peak_bytes for step in steps) for steps in repetitions]
        record.add(name, layout.config(micro_batches) | config, "peak", samples, "bytes")
