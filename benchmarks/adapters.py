"""Trains LoRA adapters of a Llama of transformers by one unedited script: ``python -m benchmarks run adapters``.

At ZeRO stage 3, stock DeepSpeed and FSDP2 gather the frozen weights in every pass. With a block, ``keep_frozen`` says
where they stay. Counts are exact on any machine. The same steps are timed on loopback and over slow networks.
``--part`` names the counts, or a link.
"""

from collections.abc import Sequence
from functools import partial
from statistics import median

from benchmarks.communication import moved
from benchmarks.contenders import Contender, Layout
from benchmarks.contenders.door import ADAPTED, Script, Sharded, reference_adapted
from benchmarks.counting import count
from benchmarks.model import ModelSize
from benchmarks.quantised import RATES
from benchmarks.record import OURS, PART, REPETITIONS, Record, begin
from benchmarks.training import LOOPBACK, SMALL, Duration, compete
from benchmarks.training_slow import SLOW
from testing.namespaces import NetworkUnavailable, throttled_network

NAME = "adapters"
RANKS = 2
ACCUMULATION = (1, 4, 8, 16)
STOCK, FSDP = "DeepSpeed ZeRO-3", "FSDP2"
HOMES = ("none", "host", "device")
COUNTS = "counts"
LINKS = (LOOPBACK, *RATES)
AIMED, LIMIT = 8, 0.2
"""The number of micro-batches at which our step over the slow network is compared with stock DeepSpeed's, and the part
of that which it may take at most."""


def contenders(accumulation: int) -> list[Contender]:
    """Returns stock DeepSpeed, FSDP2, and a block with every home of frozen weights."""
    script = partial(Script, stage=3, accumulation=accumulation, host=ADAPTED)
    blocks = {f"{OURS}, keep_frozen {home}": {"pipeline_ranks": 1, "keep_frozen": home} for home in HOMES}
    peers = [
        Contender(STOCK, script),
        Contender(FSDP, partial(Sharded, host=ADAPTED, deferred_sync=True, keeps_last=False)),
    ]
    return [*peers, *(Contender(name, partial(script, block=block)) for name, block in blocks.items())]


def run(
    part: str | None = None,
    size: ModelSize = SMALL,
    ranks: int = RANKS,
    accumulation: Sequence[int] = ACCUMULATION,
    repetitions: int = REPETITIONS,
) -> Record:
    """Counts every contender, and times it on every link, for every number of micro-batches of a rank per step; or does
    the ``part`` that is named."""
    record, layout = begin(NAME), Layout(1, ranks, size)
    for each in (COUNTS, *LINKS) if part is None else (part,):
        for micro_batches in accumulation:
            if each == COUNTS:
                _count(record, layout, micro_batches)
            else:
                _time(record, layout, micro_batches, repetitions, each)
    return record


def _count(record: Record, layout: Layout, micro_batches: int) -> None:
    """Enters what the rank that moves most moves in a step."""
    counted = count(contenders(micro_batches), layout, (micro_batches,), repetitions=1, reference=reference_adapted)
    for name, on_ranks in counted.items():
        found = [moved(on_rank.steps[micro_batches][0]) for on_rank in on_ranks]
        config = {PART: COUNTS, **layout.config(micro_batches)}
        record.add(name, config, "gathers", [max(each.gathers for each in found)], "count")
        record.add(name, config, "bytes sent", [max(each.collective_bytes for each in found)], "bytes")


def _time(record: Record, layout: Layout, micro_batches: int, repetitions: int, link: str) -> None:
    """Enters the seconds of a step on a link."""
    arguments = {NAME: contenders(micro_batches)}, layout, micro_batches, repetitions
    try:
        if link == LOOPBACK:
            found = compete(*arguments, reference=reference_adapted)[NAME]
        else:
            with throttled_network(layout.data_ranks, RATES[link][0]) as network:
                found = compete(*arguments, network.enter, reference_adapted)[NAME]
    except NetworkUnavailable as reason:
        record.lack_network(f"nothing measured at {link}", reason)
        return
    for name, durations in found.items():
        config = {PART: link, **layout.config(micro_batches), "link": link}
        record.add(name, config, "step", [duration.wall for duration in durations], "s")
    if link == SLOW and micro_batches == AIMED:
        stock, ours = (median(duration.wall for duration in found[name]) for name in (STOCK, _best(found)))
        record.aim(f"{link}: step / step of {STOCK}, M = {micro_batches}", ours / stock, LIMIT)


def _best(found: dict[str, list[Duration]]) -> str:
    """The name of ours with the shortest step."""
    ours = (name for name in found if name.startswith(OURS))
    return min(ours, key=lambda name: median(duration.wall for duration in found[name]))
