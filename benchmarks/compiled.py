"""Trains the small GPT with compiled layers and without, beside a bare loop of each: ``python -m benchmarks run
compiled``.

All take turns on one rank, in fp32 with torch's inductor, and compile in the step before the first that counts. Targets
compare CPU seconds: one thread computes, so these are the seconds of a machine that does nothing else.
"""

from functools import partial
from statistics import median

from benchmarks.contenders import Contender, Layout
from benchmarks.contenders.bare import Bare
from benchmarks.contenders.field import BARE
from benchmarks.contenders.lgamp import Layered
from benchmarks.model import ModelSize
from benchmarks.record import OURS, REPETITIONS, Record, begin
from benchmarks.training import BARE_LIMIT, MICRO_BATCHES, RECOMPUTE, SMALL, compete

NAME = "compiled"
PLAIN, COMPILED = f"{OURS}, ZeRO-1", f"{OURS}, ZeRO-1, compiled"
BARE_COMPILED = f"{BARE}, compiled"


def contenders(recompute: bool) -> list[Contender]:
    layered = partial(Layered, zero_stage=1, resident_chunks=2, recompute=RECOMPUTE[recompute])
    bare = partial(Bare, recompute=recompute)
    return [
        Contender(PLAIN, layered),
        Contender(COMPILED, partial(layered, compile=True)),
        Contender(BARE, bare),
        Contender(BARE_COMPILED, partial(bare, compiled=True)),
    ]


def run(size: ModelSize = SMALL, micro_batches: int = MICRO_BATCHES, repetitions: int = REPETITIONS) -> Record:
    """Measures the seconds of a step, with and without recomputation."""
    record, layout = begin(NAME), Layout(1, 1, size)
    for recompute, words in RECOMPUTE.items():
        found = compete({NAME: contenders(recompute)}, layout, micro_batches, repetitions)[NAME]
        config = {**layout.config(micro_batches), "width": size.width, "recompute": words}
        for name, durations in found.items():
            record.add(name, config, "step", [duration.wall for duration in durations], "s")
            record.add(name, config, "CPU", [duration.cpu for duration in durations], "s")
        cpu = {name: [duration.cpu for duration in durations] for name, durations in found.items()}
        floor = median(cpu[BARE_COMPILED]) / median(cpu[BARE])
        record.compare(f"compiled / plain, recompute {words}", cpu[COMPILED], cpu[PLAIN], 1.0, floor=floor)
        text = f"ours / bare loop, both compiled, recompute {words}"
        record.compare(text, cpu[COMPILED], cpu[BARE_COMPILED], BARE_LIMIT)
    return record
