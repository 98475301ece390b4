"""Measures memory and steps of Megatron-core's training loop over a slow network: ``python -m benchmarks run
megatron_slow``.

The loop trains the same small GPT on the same batches in every row: on pipelines with ds_lgamp at each stage, and with
Megatron-core's own schedules and distributed optimizer; without a pipeline with ds_lgamp, with the distributed
optimizer, and with Megatron-FSDP, which refuses pipelines. All recompute blocks.

Peaks are bytes of live tensors at dispatch, as in ``memory.py``; the network makes no difference to them. Seconds are
those of ``training_slow.py``.
"""

from functools import partial
from importlib.metadata import version

from benchmarks.contenders import Contender, Layout
from benchmarks.contenders.megatron_core import MegatronCore
from benchmarks.contenders.megatron_loop import InLoop, MegatronFsdp
from benchmarks.counting import count
from benchmarks.memory import enter as enter_peaks
from benchmarks.model import ModelSize
from benchmarks.record import OURS, REPETITIONS, Config, Record, begin
from benchmarks.training import MICRO_BATCHES, SMALL, compete
from benchmarks.training_slow import SLOW, SLOW_RATE
from testing.namespaces import NetworkUnavailable, throttled_network

NAME = "megatron_slow"
RANKS, PIPELINE_RANKS = 4, 2
ZERO_STAGES = (1, 2, 3)
STOCK, FSDP = "Megatron-core, distributed optimizer", "Megatron-FSDP"
SCHEDULES = {
    "1F1B": {},
    "interleaved": {"interleaved": True},
    "interleaved, one group": {"interleaved": True, "one_group": True},
}
"""Megatron-core's own, with what makes :class:`MegatronCore` take them."""
COUNTED = 3
"""Steps whose peaks are measured."""


def in_loop(zero_stage: int) -> str:
    return f"{OURS}, ZeRO-{zero_stage}"


def contenders(size: ModelSize) -> dict[Layout, list[Contender]]:
    """Returns who trains in each layout. ds_lgamp comes first."""
    ours = [Contender(in_loop(stage), partial(InLoop, zero_stage=stage)) for stage in ZERO_STAGES]
    stock = [
        Contender(f"{STOCK}, {name}", partial(MegatronCore, **chosen))  # type: ignore[arg-type]
        for name, chosen in SCHEDULES.items()
    ]
    return {
        Layout(PIPELINE_RANKS, RANKS // PIPELINE_RANKS, size): [*ours, *stock],
        Layout(1, RANKS, size): [*ours, Contender(STOCK, MegatronCore), Contender(FSDP, MegatronFsdp)],
    }


def run(
    size: ModelSize = SMALL,
    batch: int = MICRO_BATCHES * RANKS // PIPELINE_RANKS,
    counted: int = COUNTED,
    repetitions: int = REPETITIONS,
) -> Record:
    """Measures every contender.

    Args:
        size: the model.
        batch: micro-batches of all data-parallel ranks together.
        counted: steps whose peaks are measured.
        repetitions: steps whose seconds are measured.
    """
    record = begin(NAME)
    record.machine["megatron-core"] = version("megatron-core")
    for layout, members in contenders(size).items():
        micro_batches = batch // layout.data_ranks
        for name, on_ranks in count(members, layout, [micro_batches], memory=True, repetitions=counted).items():
            enter_peaks(record, name, layout, on_ranks)
        try:
            with throttled_network(RANKS, SLOW_RATE) as network:
                found = compete({"": members}, layout, micro_batches, repetitions, network.enter)[""]
        except NetworkUnavailable as reason:
            record.lack_network(f"no seconds at {SLOW}", reason)
            continue
        config: Config = {**layout.config(micro_batches), "link": SLOW}
        for name, durations in found.items():
            record.add(name, config, "step", [duration.wall for duration in durations], "s")
    aim(record)
    return record


def aim(record: Record) -> None:
    """Enters the targets of both layouts: sharded chunks hold less than the distributed optimizer, and no step is
    longer than that of the fastest peer that holds as much."""
    for ranks in (PIPELINE_RANKS, 1):
        for metric, own, peer in (("peak", in_loop(3), STOCK), ("step", in_loop(1), STOCK), ("step", in_loop(3), FSDP)):
            found = {
                row.contender: row.median
                for row in record.rows
                if row.metric == metric and row.config["pipeline_ranks"] == ranks
            }
            peers = [name for name in found if name.startswith(peer)]
            if peers:
                least = min(peers, key=found.__getitem__)
                text = f"{metric} of {own} / {metric} of {least}, {ranks} x {RANKS // ranks} ranks"
                record.aim(text, found[own] / found[least], 1)
