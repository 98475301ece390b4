"""Times the update of a chunk on the host beside the time that its bytes need to cross the memory bus:
``python -m benchmarks run host_update``.

The engine's own updates step AdamW on a chunk in memory, with copies of its weights in fp32, with all state in bf16 or
with bitsandbytes' moments in 8 bits beside copies in fp32.
The bound is what as many bytes take that a multiplication in place reads and writes, with as many threads. The floor is
torch's fused AdamW on the same tensors, and a copy that rounds the weights. All take turns.
"""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import Parameter

from benchmarks.record import OURS, REPETITIONS, Config, Record, begin
from ds_lgamp.integrations.deepspeed.config.client_optimizer import in_8_bits
from ds_lgamp.optimizers.host_updates import updates_of
from ds_lgamp.partition.bus import Bus
from ds_lgamp.partition.host import Host, HostThread
from ds_lgamp.partition.policy import UnitParameter, ZeroPolicy
from ds_lgamp.partition.zero_partition import build_partition
from testing.ranks import run_on_ranks

NAME = "host_update"
PARAMETERS = 1 << 25
"""Of the chunk: many times what caches hold."""
THREADS = (1, 2)
LIMIT = 1.2
"""How many times the bound an update with copies in fp32 may take."""
CPU = torch.device("cpu")


class Way(NamedTuple):
    """How a chunk is updated."""

    name: str
    bytes: int
    """What is read and written once of each parameter: weights, gradient and two moments, but no gradient is written.
    """
    copies: bool = True
    """Whether AdamW updates copies of the weights in fp32, which are rounded to bf16."""
    rounds: bool = False
    in_8_bits: bool = False
    """Whether bitsandbytes keeps its moments in 8 bits."""
    factor: float = 1.0
    """What clipping multiplies the gradient by."""


# Copies in fp32 and moments are read and written, the gradient is read, and weights in bf16 are written.
_COPIES, _HALF, _NARROW = 3 * 8 + 4 + 2, 3 * 4 + 2, 8 + 2 * 2 + 4 + 2
FLOOR = "torch's fused AdamW and a copy"
WAYS = (
    Way(f"{OURS}, copies in fp32", _COPIES),
    Way(f"{OURS}, copies in fp32, clipped", _COPIES, factor=0.5),
    Way(f"{OURS}, state in bf16, nearest", _HALF, copies=False),
    Way(f"{OURS}, state in bf16, by chance", _HALF, copies=False, rounds=True),
    Way(f"{OURS}, copies in fp32, moments in 8 bits", _NARROW, in_8_bits=True),
)


def run(parameters: int = PARAMETERS, repetitions: int = REPETITIONS) -> Record:
    """Times every way with every number of threads."""
    record = begin(NAME)
    for threads in THREADS:
        ((found, bound),) = run_on_ranks(1, _measure, parameters, threads, repetitions, seconds=900)
        config: Config = {"threads": threads}
        rate = [8 * parameters / seconds / 1e9 for seconds in bound]
        record.add("multiplication in place", config, "read and written", rate, "GB/s")
        for way in (Way(FLOOR, _COPIES), *WAYS):
            ratios = [seconds / (way.bytes / 8 * least) for seconds, least in zip(found[way.name], bound)]
            each = [1e9 * seconds / parameters for seconds in found[way.name]]
            record.add(way.name, config, "update", each, "ns per parameter")
            record.add(way.name, config, "update / bound", ratios, "ratio")
            if way.name == FLOOR:
                floor = median(ratios)
            elif way is WAYS[0]:
                text = f"update / bound, copies in fp32, threads = {threads}"
                record.aim(text, median(ratios), LIMIT, floor=floor, samples=ratios)
    return record


def _measure(parameters: int, threads: int, repetitions: int) -> tuple[dict[str, list[float]], list[float]]:
    """Returns the seconds of every update by way, and of as many multiplications in place."""
    torch.set_num_threads(threads)
    values = torch.ones(parameters)
    updates = {FLOOR: _bare_update(parameters)} | {way.name: _update_of(way, parameters) for way in WAYS}
    found: dict[str, list[float]] = {name: [] for name in updates}
    bound: list[float] = []
    for repetition in range(repetitions + 1):
        seconds = {name: timed(update) for name, update in updates.items()}
        least = timed(lambda: values.mul_(1.0))
        if repetition:
            # The first update makes the state.
            bound.append(least)
            for name, own in seconds.items():
                found[name].append(own)
    return found, bound


def timed(act: Callable[[], object]) -> float:
    """Returns the seconds of a call."""
    begun = perf_counter()
    act()
    return perf_counter() - begun


def _bare_update(parameters: int) -> Callable[[], None]:
    """Returns the update of as many parameters without an engine."""
    weight = Parameter(torch.randn(parameters))
    weight.grad = torch.full_like(weight, 1e-3)
    rounded = torch.empty(parameters, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, fused=True)

    def update() -> None:
        optimizer.step()
        rounded.copy_(weight.detach())

    return update


def _update_of(way: Way, parameters: int) -> Callable[[], None]:
    """Returns the engine's update of one chunk on the host."""
    weight = Parameter(torch.randn(parameters, dtype=torch.bfloat16))
    host = Host(Bus(CPU), HostThread(CPU), parameters=True)
    policy = ZeroPolicy(dist.group.WORLD, 3, host=host, copies_weights=way.copies, state_in_8_bits=way.in_8_bits)
    partition = build_partition({0: [UnitParameter("weight", weight, 0)]}, [], policy, CPU)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW([weight], lr=1e-3, fused=True)
    if way.in_8_bits:
        from bitsandbytes.optim import AdamW8bit

        optimizer = in_8_bits(AdamW8bit([weight], lr=1e-3))
    updates = updates_of(optimizer, partition, "reduction", way.rounds)
    (unit,), options = partition.units, updates.options()
    gradient = unit.stored_gradient
    assert gradient is not None, "the host updates the chunk"
    gradient.fill_(1e-3)

    def update() -> None:
        unit.reduction.shard_gradient = gradient
        unit.master.take_gradient(gradient)
        updates.update_alone(unit, way.factor, options)

    return update
