"""Steps of virtual compute beside their simulated times, as rows of a record."""

from collections.abc import Sequence

from benchmarks.record import Config, Record
from benchmarks.virtual.chunk import Setting
from benchmarks.virtual.pipelines import Contender
from benchmarks.virtual.steps import Hop
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import Timeline, simulate

SLOW, SLOW_RATE = "1 Gbit/s", "1gbit"
"""The slow link as people write it, and as tc does."""
MEGABYTE = 1 << 20
"""What crosses a chunk boundary on it."""


def simulated(contender: Contender, setting: Setting, hop: float = 0.0, message: float = 0.0) -> Timeline:
    """The order of ``contender`` on paper; ``hop`` and ``message`` in seconds."""
    spec = contender.spec(setting)
    return simulate(spec, build_program(spec), setting.durations(hop, message=message))


def enter_hop(record: Record, config: Config, hop: Hop) -> None:
    record.add("gloo", config, "hop", [sample * 1000 for sample in hop.one_way], "ms")
    record.add("gloo", config, "hop, both ways at once", [sample * 1000 for sample in hop.two_way], "ms")


def enter_bubbles(record: Record, name: str, config: Config, steps: Sequence[float], timeline: Timeline) -> list[float]:
    """The bubbles of ``steps`` in seconds, which the contender ``name`` took, and that of its order on paper; returns
    the former."""
    bubbles = [step / timeline.ideal - 1 for step in steps]
    record.add(name, config, "bubble", bubbles, "ratio")
    record.add(name, config, "simulated bubble", [timeline.bubble], "ratio")
    return bubbles
