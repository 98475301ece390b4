"""Times steps with everything on the host behind a throttled bus: ``python -m benchmarks run bus``.

Chunks sleep, in their forwards, backwards and updates. Loads and stores are real copies on a bus that takes ``LOADS``
seconds for a chunk, in each direction. The layered order is compared with one micro-batch after another, which loads
every chunk for every micro-batch, and with everything on the device. With everything on a disk, which takes ``DISK``
seconds to read a chunk while it writes one, updates take what its bytes take. All take turns, and each turn makes
several steps without a pause, because loads of one step wait for updates of the one before. The time counts from the
end of the first step to the end of the last.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from statistics import median
from threading import Lock
from typing import Any

import torch

from benchmarks.record import OURS, Config, Record, begin
from benchmarks.virtual.chunk import Setting, sleep_until
from benchmarks.virtual.pipelines import Executed, spec_of
from benchmarks.virtual.steps import Start, is_precise, scheduling, seconds_in_turns
from ds_lgamp.partition import disk as disks
from ds_lgamp.partition.disk import Disk, Move
from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.costs import DiskSeconds, uniform_costs
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import Offload, ProgramSpec
from testing.ranks import run_on_ranks

NAME = "bus"
LOADS = (0.010, 0.040)
"""Seconds of a chunk on the bus."""
PARAMETERS = 1 << 18
MICRO_BATCHES = (1, 4, 16)
DISK = 0.020
"""Seconds in which the disk reads a chunk, or writes one meanwhile."""
PIECE = 1 << 16
"""Bytes that the disk moves at once. A real chunk is many times as large, and so are its pieces."""
IN_MEMORY, LAYERED, OUTER, ON_DISK = (
    f"{OURS}, all on the device",
    f"{OURS}, layered, all on the host",
    f"{OURS}, one micro-batch after another, all on the host",
    f"{OURS}, layered, all on a disk",
)
RATIO = "one micro-batch after another / layered"
ALLOWED = 1.05
"""How many times the longest of compute, bus and updates a step may take, beside the first load and the last store."""
TURNS = 3
STEPS = 3
"""Steps per turn, including the first, which does not count."""
SECONDS = 900

Key = tuple[str, int, float]
"""Contender, micro-batches, and seconds of a load."""
Found = tuple[dict[Key, list[float]], bool]
"""Seconds per step of every turn but the first; and whether the process had real-time priority."""


def setting_of(name: str, micro_batches: int) -> Setting:
    """Eight chunks on one rank. An update on the host takes as long as a backward of one micro-batch. One on the device
    takes no time, and one of what is on a disk that of its bytes."""
    update = 0.0 if name in (IN_MEMORY, ON_DISK) else 0.010
    return Setting(1, 8, micro_batches, forward=0.005, backward=0.010, parameters=PARAMETERS, update=update)


def run(
    micro_batches: Sequence[int] = MICRO_BATCHES, loads: Sequence[float] = LOADS, turns: int = TURNS, steps: int = STEPS
) -> Record:
    """Measures all orders for every number of micro-batches and every speed of the bus."""
    record = begin(NAME)
    keys = list(product((IN_MEMORY, LAYERED, OUTER, ON_DISK), micro_batches, loads))
    ((seconds, precise),) = run_on_ranks(1, _measure, keys, turns, steps, before_init=Start(None), seconds=SECONDS)
    record.machine["scheduling"] = scheduling(precise)
    for number, load in product(micro_batches, loads):
        enter(record, number, load, seconds)
    return record


def enter(record: Record, micro_batches: int, load: float, seconds: dict[Key, list[float]]) -> None:
    """Enters the rows of a number of micro-batches and a speed."""
    config: Config = {"micro_batches": micro_batches, "load_ms": round(1000 * load)}
    steps = {name: seconds[name, micro_batches, load] for name in (IN_MEMORY, LAYERED, OUTER, ON_DISK)}
    simulated = {}
    for name, found in steps.items():
        setting = setting_of(name, micro_batches)
        durations = setting.durations()._replace(load=load, store=load)
        spec = spec_in_order(name, setting)
        costs = uniform_costs(spec, durations)
        if name == ON_DISK:
            # An update by SGD reads a gradient and weights.
            costs = replace(costs, disk=[DiskSeconds(DISK, DISK, 2 * DISK, DISK)] * spec.chunks)
        record.add(name, config, "step", [1000 * each for each in found], "ms")
        simulated[name] = simulate(spec, build_program(spec), costs).step_time
        record.add(name, config, "simulated", [1000 * simulated[name]], "ms")
    pairs = zip(steps[OUTER], steps[LAYERED])
    record.add(LAYERED, config, RATIO, [outer / layered for outer, layered in pairs], "ratio")
    allowed = ALLOWED * longest(micro_batches, load, median(steps[IN_MEMORY])) + 2 * load
    ratios = [step / allowed for step in steps[LAYERED]]
    text = f"step / ({ALLOWED} x max(compute, bus, updates) + first load + last store)"
    text = f"{micro_batches} micro-batches, {config['load_ms']} ms per load: {text}"
    record.aim(text, median(ratios), 1.0, floor=simulated[LAYERED] / allowed, samples=ratios)


def longest(micro_batches: int, load: float, compute: float) -> float:
    """Returns the longest of ``compute`` and of the loads, the stores and the updates of a step."""
    setting = setting_of(LAYERED, micro_batches)
    (program,) = build_program(spec_in_order(LAYERED, setting))
    moved = (load * sum(action.kind is kind for action in program) for kind in (Kind.LOAD, Kind.STORE))
    return max(compute, *moved, setting.chunks * setting.update)


def spec_in_order(name: str, setting: Setting) -> ProgramSpec:
    return spec_of("layered", setting, 3, **_order(name, setting))


def _order(name: str, setting: Setting) -> dict[str, Any]:
    offload = None if name == IN_MEMORY else Offload(True, alone=True)
    return {
        "micro_batch_group": 1 if name == OUTER else setting.micro_batches,
        "updates": "step" if offload is None else "reduction",
        "offload": offload,
    }


def _measure(keys: Sequence[Key], turns: int, steps: int) -> Found:
    pipelines = {key: _pipeline(*key) for key in keys}
    return seconds_in_turns(pipelines, turns, steps), is_precise()


def _pipeline(name: str, micro_batches: int, load: float) -> Executed:
    setting, disks.PIECE = setting_of(name, micro_batches), PIECE
    disk = PacedDisk(tempfile.gettempdir(), 4 * PARAMETERS / DISK) if name == ON_DISK else None
    return Executed(setting, "layered", 3, bytes_per_second=4 * PARAMETERS / load, disk=disk, **_order(name, setting))


class PacedDisk(Disk):
    """A disk that reads so many bytes per second at most, and writes as many meanwhile."""

    def __init__(self, path: str, bytes_per_second: float) -> None:
        super().__init__(path)
        self._rate, self._pace = bytes_per_second, Lock()
        self._free_at: defaultdict[Move, float] = defaultdict(float)
        """When it has moved all pieces that have begun to move, in each direction."""

    def _move(self, move: Move, memory: torch.Tensor, start: int) -> None:
        with self._pace:
            end = self._free_at[move] = max(time.monotonic(), self._free_at[move]) + memory.nbytes / self._rate
        super()._move(move, memory, start)
        sleep_until(end)
