"""Enters steps of virtual compute and their simulated times into a record."""

from collections.abc import Sequence

from benchmarks.record import Config, Record
from benchmarks.virtual.chunk import Setting
from benchmarks.virtual.pipelines import Contender
from benchmarks.virtual.steps import Hop
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import Timeline, simulate

SLOW, SLOW_RATE = "1 Gbit/s", "1gbit"
"""The slow link's rate as people and as tc write it."""
MEGABYTE = 1 << 20
"""Bytes of one message on the slow link."""


def simulated(contender: Contender, setting: Setting, hop: float = 0.0, message: float = 0.0) -> Timeline:
    """Simulates the order of ``contender``; ``hop`` and ``message`` are in seconds."""
    spec = contender.spec(setting)
    return simulate(spec, build_program(spec), setting.durations(hop, message=message))


def enter_hop(record: Record, config: Config, hop: Hop) -> None:
    record.add("gloo", config, "hop", [sample * 1000 for sample in hop.one_way], "ms")
    record.add("gloo", config, "hop, both ways at once", [sample * 1000 for sample in hop.two_way], "ms")


def enter_bubbles(record: Record, name: str, config: Config, steps: Sequence[float], timeline: Timeline) -> list[float]:
    """Enters the measured bubbles of a contender, given its ``steps`` in seconds, and its simulated bubble. Returns the
    measured ones."""
    bubbles = [step / timeline.ideal - 1 for step in steps]
    record.add(name, config, "bubble", bubbles, "ratio")
    record.add(name, config, "simulated bubble", [timeline.bubble], "ratio")
    return bubbles
