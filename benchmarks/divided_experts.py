"""Trains a mixture of experts by one unedited script with stock DeepSpeed's AutoEP and with a block beside it, and
without expert parallelism with FSDP2: ``python -m benchmarks run divided_experts``.

Two ranks divide the experts of a layer. It counts gathers and reductions of experts apart from those of all other
parameters, the all-to-alls of tokens, and the peak of live tensors; and it times the same steps on loopback and over a
slow network. The counts are exact on any machine, but for the bytes of tokens, which depend on the experts that these
choose. ``--part`` does one part alone.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

from benchmarks.communication import moved
from benchmarks.contenders import Contender, Layout
from benchmarks.contenders.door import Sharded
from benchmarks.contenders.mixture import DEEPSEEK, DividedExperts, deepseek, is_divided, reference
from benchmarks.counting import Step, count
from benchmarks.model import ModelSize
from benchmarks.record import OURS, PART, REPETITIONS, Config, Record, begin
from benchmarks.training import LOOPBACK, compete
from benchmarks.training_slow import SLOW, SLOW_RATE
from ds_lgamp.cost.units import offsets, part_size
from testing.namespaces import NetworkUnavailable, throttled_network

NAME = "divided_experts"
SIZE = ModelSize(blocks=4, width=128, sequence=64, vocabulary=512)
EXPERT_RANKS = 2
COUNTS = "counts"
TIMED = {"seconds of two ranks": 2, "seconds of four ranks": 4}
"""The other parts, and their data-parallel ranks. Both are counted."""
ACCUMULATION = (1, 4, 16)
RESIDENT = 2
FORWARD, BACKWARD = 3, 2
"""All-to-alls of a layer: how many tokens go where, the tokens, and what experts made of them; and the gradients of
the latter two."""
DEFAULT, RECOMPUTES_NOTHING = f"{OURS} ZeRO-3", f"{OURS} ZeRO-3, no recomputation"
STOCK, SHARDED, DEFERRED = "DeepSpeed ZeRO-3, AutoEP", "FSDP2", "FSDP2, deferred sync"


class Traffic(NamedTuple):
    """What a rank moves in a step."""

    gathers: int
    reductions: int
    sent: int
    """Bytes of both."""
    expert_gathers: int
    expert_reductions: int
    expert_sent: int
    all_to_alls: int
    tokens_sent: int
    """Bytes of the all-to-alls."""


def contenders(accumulation: int) -> list[Contender]:
    """Returns the contenders, for a number of micro-batches of a rank per step. Stock DeepSpeed is the first, so that
    nothing of ds_lgamp is there."""
    divided = partial(DividedExperts, accumulation=accumulation, expert_ranks=EXPERT_RANKS)
    sharded = partial(Sharded, host=DEEPSEEK, keeps_last=True)
    return [
        Contender(STOCK, divided),
        Contender(SHARDED, partial(sharded, deferred_sync=False)),
        Contender(DEFERRED, partial(sharded, deferred_sync=True)),
        Contender(DEFAULT, partial(divided, block={})),
        Contender(RECOMPUTES_NOTHING, partial(divided, block={"recompute": "none"})),
    ]


def run(
    part: str | None = None,
    size: ModelSize = SIZE,
    accumulation: Sequence[int] = ACCUMULATION,
    repetitions: int = REPETITIONS,
) -> Record:
    """Counts and times every contender, for every number of micro-batches of a rank per step; or does the ``part``
    that is named."""
    record = begin(NAME)
    if part in (None, COUNTS):
        deviations = 0
        for ranks, micro_batches in product(TIMED.values(), accumulation):
            layout = Layout(1, ranks, size)
            for name, on_ranks in count_all(layout, micro_batches).items():
                _enter(record, name, {PART: COUNTS, **layout.config(micro_batches)}, on_ranks)
                deviations += deviations_of(name, layout, micro_batches, [traffic for traffic, _ in on_ranks])
        record.aim(f"{COUNTS}: those of ds_lgamp that differ from the formula", deviations, 0)
    for name, ranks in TIMED.items():
        if part in (None, name):
            for micro_batches in accumulation:
                _time(record, name, Layout(1, ranks, size), micro_batches, repetitions)
    return record


def count_all(
    layout: Layout, micro_batches: int, chosen: Sequence[str] | None = None
) -> dict[str, list[tuple[Traffic, int]]]:
    """Returns what every rank moves in a step, and its peak of bytes, by contender. The losses are compared with one
    process."""
    members = [each for each in contenders(micro_batches) if chosen is None or each.name in chosen]
    counted = count(members, layout, (micro_batches,), memory=True, repetitions=1, reference=reference)
    steps = {name: [each.steps[micro_batches][0] for each in on_ranks] for name, on_ranks in counted.items()}
    return {name: [(traffic_of(step), step.peak_bytes) for step in each] for name, each in steps.items()}


def traffic_of(step: Step) -> Traffic:
    """Sorts the calls of a step by the ranks that they are among."""
    experts, exchange = (step.in_groups.get(name, []) for name in ("experts", "tokens"))
    # The same ranks agree on small numbers, too.
    tokens = [(kind, amount) for kind, amount in exchange if kind == "all_to_all"]
    others = Counter(step.log) - Counter(experts) - Counter(tokens)
    of_rest, of_experts = (moved(Step([*calls], 0)) for calls in (others.elements(), experts))
    return Traffic(*of_rest[:3], *of_experts[:3], len(tokens), sum(amount for _, amount in tokens))


def predicted(layout: Layout, micro_batches: int, recomputes: bool) -> tuple[int, ...]:
    """Returns the fields of :class:`Traffic` for ds_lgamp, but for the bytes of tokens, which depend on their
    values. Every block is a chunk; the first has the embedding, and the last the norm and the head."""
    size, ranks = layout.size, layout.data_ranks
    chunks, copies = size.blocks, ranks // EXPERT_RANKS
    resident = min(RESIDENT, chunks)
    gathers, reductions = 2 * chunks - resident, chunks
    again = chunks - resident
    """Chunks that are gathered once more, which are the first."""
    rest: list[list[int]] = [[] for _ in range(chunks)]
    experts: list[list[int]] = [[] for _ in range(chunks)]
    for name, parameter in deepseek(size).named_parameters():
        block = name.partition("layers.")[2].partition(".")[0]
        chunk = int(block) if block else 0 if "embed" in name else chunks - 1
        if is_divided(name):
            matrices = 2 if "gate_up" in name else 1
            experts[chunk].extend([parameter.numel() // EXPERT_RANKS // matrices] * matrices)
        else:
            rest[chunk].append(parameter.numel())

    def sent(units: list[list[int]], sharing: int) -> int:
        parts = [part_size(offsets(unit)[-1], sharing) * 4 * (sharing - 1) for unit in units]
        return 2 * sum(parts) + sum(parts[:again])

    of_experts = (gathers, reductions, sent(experts, copies)) if copies > 1 else (0, 0, 0)
    recomputed = FORWARD * (chunks - 1) if recomputes else 0
    exchanges = micro_batches * (chunks * (FORWARD + BACKWARD) + recomputed)
    return gathers, reductions, sent(rest, ranks), *of_experts, exchanges


def deviations_of(name: str, layout: Layout, micro_batches: int, on_ranks: Sequence[Traffic]) -> int:
    """Returns how many counts of ds_lgamp differ from the formula, over all ranks."""
    if not name.startswith(OURS):
        return 0
    right = predicted(layout, micro_batches, recomputes=name == DEFAULT)
    return sum(found != wanted for traffic in on_ranks for found, wanted in zip(traffic, right))


def _enter(record: Record, name: str, config: Config, on_ranks: Sequence[tuple[Traffic, int]]) -> None:
    """Enters the largest counts of any rank."""
    for metric in Traffic._fields:
        most = max(getattr(traffic, metric) for traffic, _ in on_ranks)
        record.add(name, config, metric, [most], "bytes" if metric.endswith("sent") else "count")
    record.add(name, config, "peak", [max(peak for _, peak in on_ranks)], "bytes")


def _time(record: Record, part: str, layout: Layout, micro_batches: int, repetitions: int) -> None:
    """Enters the seconds of a step on both links."""
    arguments = {NAME: contenders(micro_batches)}, layout, micro_batches, repetitions
    found = {LOOPBACK: compete(*arguments, reference=reference)[NAME]}
    try:
        with throttled_network(layout.data_ranks, SLOW_RATE) as network:
            found[SLOW] = compete(*arguments, network.enter, reference)[NAME]
    except NetworkUnavailable as reason:
        record.lack_network(f"nothing measured at {SLOW}", reason)
    for link, each in found.items():
        for name, durations in each.items():
            config = {PART: part, **layout.config(micro_batches), "link": link}
            record.add(name, config, "step", [duration.wall for duration in durations], "s")
