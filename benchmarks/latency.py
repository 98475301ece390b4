"""Measures how slow messages affect each schedule: ``python -m benchmarks run latency``.

The layered schedule needs another pipeline rank's result one round of micro-batches later. Interleaved 1F1B needs it
almost at once. Compute is virtual (every chunk sleeps) with several durations. Messages of 1 MiB are real and go over
gloo and links of 1 Gbit/s. Each contender's bubble is compared with the simulation of its own schedule
(``ds_lgamp/schedule/simulate.py``). The hop time is that of one message alone, calibrated in the same run. A second
simulation also sends messages on a link one after another.
"""

from collections.abc import Sequence
from statistics import median

from benchmarks.record import REPETITIONS, Record, begin
from benchmarks.virtual.bubbles import MEGABYTE, SLOW, SLOW_RATE, enter_bubbles, enter_hop, simulated
from benchmarks.virtual.chunk import Setting
from benchmarks.virtual.pipelines import BARE_LOOP, CONTENDERS, INTERLEAVED, LAYERED
from benchmarks.virtual.steps import Measured, measure, scheduling
from testing.namespaces import NetworkUnavailable, throttled_network

NAME = "latency"
FORWARDS = (0.005, 0.010, 0.020)
"""Forward seconds of one chunk and micro-batch. A backward takes twice as long."""
SETTINGS = [Setting(4, 4, 8, forward, 2 * forward, MEGABYTE // 4) for forward in FORWARDS]
LOOPED = [contender for contender in CONTENDERS if contender.suits(SETTINGS[0])]
"""Contenders with several chunks per rank."""
MESSAGE = 8 * MEGABYTE / 1e9
"""Seconds that a message occupies a link. A single message arrives a little earlier, because the throttle lets the
first packets pass."""
RATIO, RATIO_BUSY = "bubble / simulated bubble", "bubble / simulated bubble, one message after another"
LIMIT, LIMIT_TO_INTERLEAVED = 1.3, 0.6


def run(settings: Sequence[Setting] = SETTINGS, repetitions: int = REPETITIONS) -> Record:
    """Measures ``settings``, which must have the same number of ranks. Records the reason if this machine cannot make a
    slow link."""
    record = begin(NAME)
    try:
        with throttled_network(settings[0].pipeline_ranks, SLOW_RATE) as network:
            measured = measure(settings, LOOPED, repetitions, network.enter)
    except NetworkUnavailable as reason:
        record.lack_network(f"nothing measured at {SLOW}", reason)
    else:
        enter(record, settings, measured)
    return record


def enter(record: Record, settings: Sequence[Setting], measured: Measured) -> None:
    """Enters the rows and targets of all settings."""
    record.machine["scheduling"] = scheduling(measured.precise)
    for setting, hops, seconds in zip(settings, measured.hops, measured.seconds):
        config = {"forward_ms": setting.forward * 1000, "backward_ms": setting.backward * 1000}
        hop = median(hops.one_way)
        enter_hop(record, config, hops)
        bubbles = {}
        for contender in LOOPED:
            timeline = simulated(contender, setting, hop)
            found = enter_bubbles(record, contender.name, config, seconds[contender.name], timeline)
            busy = simulated(contender, setting, hop, MESSAGE).bubble
            record.add(contender.name, config, RATIO, [bubble / timeline.bubble for bubble in found], "ratio")
            record.add(contender.name, config, RATIO_BUSY, [bubble / busy for bubble in found], "ratio")
            bubbles[contender.name] = found
        length = f"{setting.forward * 1000:g} ms forward"
        simulation = [simulated(LAYERED, setting, hop).bubble] * len(bubbles[LAYERED.name])
        bare = median(bubbles[BARE_LOOP.name])
        for name, theirs, limit in (
            (f"{RATIO} of {LAYERED.name}", simulation, LIMIT),
            (f"bubble of {LAYERED.name} / {INTERLEAVED.name}", bubbles[INTERLEAVED.name], LIMIT_TO_INTERLEAVED),
        ):
            floor = bare / median(theirs)
            record.compare(f"{name}, {length}", bubbles[LAYERED.name], theirs, limit, floor=floor)
