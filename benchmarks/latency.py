"""What messages that take long do to an order: ``python -m benchmarks run latency``.

The layered order needs what another pipeline rank computes a round of micro-batches later, interleaved 1F1B almost at
once. Compute is virtual (every chunk sleeps) and of several lengths, messages of 1 MiB are real gloo over links of
1 Gbit/s. Every contender's bubble is beside what ``ds_lgamp/schedule/simulate.py`` says for its own order: with a hop
as long as one message's way alone, calibrated in the same run, and with links that carry one message after another too.
"""

from collections.abc import Sequence
from statistics import median

from benchmarks.namespaces import NetworkUnavailable, throttled_network
from benchmarks.record import REPETITIONS, Record, begin
from benchmarks.virtual.bubbles import MEGABYTE, SLOW, SLOW_RATE, enter_bubbles, enter_hop, simulated
from benchmarks.virtual.chunk import Setting
from benchmarks.virtual.pipelines import CONTENDERS, INTERLEAVED, LAYERED
from benchmarks.virtual.steps import Measured, measure, scheduling

NAME = "latency"
FORWARDS = (0.005, 0.010, 0.020)
"""Seconds of one chunk and micro-batch; a backward takes twice as long."""
SETTINGS = [Setting(4, 4, 8, forward, 2 * forward, MEGABYTE // 4) for forward in FORWARDS]
LOOPED = [contender for contender in CONTENDERS if contender.suits(SETTINGS[0])]
"""Those with several chunks per rank."""
MESSAGE = 8 * MEGABYTE / 1e9
"""Seconds a link is busy with one. Alone, it arrives a little earlier: the throttle lets the first packets pass."""
RATIO, RATIO_BUSY = "bubble / simulated bubble", "bubble / simulated bubble, one message after another"
LIMIT, LIMIT_TO_INTERLEAVED = 1.3, 0.6


def run(settings: Sequence[Setting] = SETTINGS, repetitions: int = REPETITIONS) -> Record:
    """Measures ``settings``, all of as many ranks; says so where there can be no slow link."""
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
    """The rows and targets of all settings."""
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
            bubbles[contender.name] = median(found)
        length = f"{setting.forward * 1000:g} ms forward"
        ratio = bubbles[LAYERED.name] / simulated(LAYERED, setting, hop).bubble
        record.aim(f"{RATIO} of {LAYERED.name}, {length}", ratio, LIMIT)
        ratio = bubbles[LAYERED.name] / bubbles[INTERLEAVED.name]
        record.aim(f"bubble of {LAYERED.name} / {INTERLEAVED.name}, {length}", ratio, LIMIT_TO_INTERLEAVED)
