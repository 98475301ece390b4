"""Times steps of ranks of unlike speeds, with equal work and with work by speed: ``python -m benchmarks run speeds``.

Layers sleep, on fast ranks for less time. The engine is that of ``deepspeed.initialize``, with the key
``pipeline_rank_speeds`` or ``data_rank_speeds``, or with neither. Messages and collectives go over loopback and are
small. The clock (``ds_lgamp/schedule/simulate.py``) runs the same programs, and only the sleeps take time on it.
"""

import gc
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule

import ds_lgamp
from benchmarks.record import OURS, REPETITIONS, Config, Record, begin
from benchmarks.virtual.chunk import TOLERANCE, VirtualChunk, loss_function, weight_of
from benchmarks.virtual.steps import Start, begin_together, is_precise, scheduling
from ds_lgamp.schedule.costs import Durations, sized_costs
from ds_lgamp.schedule.placement import place_chunks, shares_by_speed, split_by_speed, split_evenly
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import ProgramSpec
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks

NAME = "speeds"
FORWARD, BACKWARD = 0.010, 0.020
"""Seconds of a layer on a rank of speed 1."""
ELEMENTS, SECONDS = 64, 600
EQUAL, BY_SPEED = f"{OURS}, equal work", f"{OURS}, work by speed"
STEP, CLOCK, OVER_CLOCK, OVER_EVEN = "step", "clock", "step / clock", "step / all busy"
LIMIT, GAIN = 1.10, 0.75
"""Largest step of work by speed relative to one in which all ranks are always busy, and to one with equal work."""


class Case(NamedTuple):
    """Ranks of unlike speeds, all of one pipeline or all data-parallel."""

    key: str
    speeds: tuple[float, ...]
    layers: int
    micro_batches: int
    """Of the batch, over all ranks."""

    @property
    def pipeline_ranks(self) -> int:
        return len(self.speeds) if self.key == "pipeline_rank_speeds" else 1

    @property
    def data_ranks(self) -> int:
        return len(self.speeds) // self.pipeline_ranks

    @property
    def config(self) -> Config:
        return {"key": self.key, "speeds": " : ".join(f"{speed:g}" for speed in self.speeds)}

    @property
    def busy(self) -> float:
        """Seconds of a step in which all ranks always compute."""
        return (FORWARD + BACKWARD) * self.layers * self.micro_batches / sum(self.speeds)

    def block(self, by_speed: bool) -> dict[str, Any]:
        """Returns the block of ds_config.json."""
        keys = {self.key: list(self.speeds)} if by_speed else {}
        if not (by_speed and self.pipeline_ranks > 1):
            keys["layers_per_chunk"] = 1
        return {"recompute": "none", **keys}

    def shares(self, by_speed: bool) -> list[int]:
        """Returns the micro-batches of every data-parallel rank."""
        if self.pipeline_ranks > 1:
            return [self.micro_batches]
        return shares_by_speed(self.micro_batches, self.speeds if by_speed else (1.0,) * len(self.speeds))


CASES = (
    Case("pipeline_rank_speeds", (2, 1), 24, 8),
    Case("data_rank_speeds", (2, 1), 8, 12),
    Case("pipeline_rank_speeds", (2, 2, 2, 1), 28, 8),
    Case("data_rank_speeds", (2, 2, 2, 1), 8, 28),
)


class Layer(VirtualChunk):
    """A layer that takes as long as the speed of its rank says."""

    def __init__(self, index: int, speeds: Sequence[float]) -> None:
        speed = speeds[dist.get_rank()]
        super().__init__(index, FORWARD / speed, BACKWARD / speed)


class Step(NamedTuple):
    """A step on one rank: start, end and loss."""

    start: float
    end: float
    loss: float


class OnRank(NamedTuple):
    """Results of one rank."""

    steps: dict[str, list[Step]]
    precise: bool


def run(cases: Sequence[Case] = CASES, repetitions: int = REPETITIONS) -> Record:
    """Measures every case with equal work and with work by speed."""
    record = begin(NAME)
    for case in cases:
        found = run_on_ranks(
            len(case.speeds), measure_on_rank, case, repetitions, before_init=Start(None), seconds=SECONDS
        )
        record.machine["scheduling"] = scheduling(all(rank.precise for rank in found))
        enter(record, case, {name: durations(case, [rank.steps[name] for rank in found]) for name in found[0].steps})
    return record


def enter(record: Record, case: Case, found: dict[str, list[float]]) -> None:
    """Enters the steps of a case, what the clock says, and the targets."""
    for name, seconds in found.items():
        clock = seconds_on_clock(case, name == BY_SPEED)
        record.add(name, case.config, STEP, [step * 1000 for step in seconds], "ms")
        record.add(name, case.config, CLOCK, [clock * 1000], "ms")
        record.add(name, case.config, OVER_CLOCK, [step / clock for step in seconds], "ratio")
        record.add(name, case.config, OVER_EVEN, [step / case.busy for step in seconds], "ratio")
    ours, where = median(found[BY_SPEED]), f"{case.key} {case.config['speeds']}"
    # The bubble is no fault of the shares.
    bound = max(case.busy, seconds_on_clock(case, by_speed=True))
    record.aim(f"step / clock, {where}", ours / bound, LIMIT)
    record.aim(f"step / step of equal work, {where}", ours / median(found[EQUAL]), GAIN)


def durations(case: Case, on_ranks: Sequence[Sequence[Step]]) -> list[float]:
    """Returns the seconds of every step but the first. Raises AssertionError if a loss is wrong."""
    right = mean_input(case)
    for layer in range(case.layers):
        right *= weight_of(layer)
    for ranks in zip(*on_ranks):
        for step in ranks:
            assert abs(step.loss - right) <= TOLERANCE * right, f"{case}: loss {step.loss} instead of {right}"
    return [max(step.end for step in ranks) - min(step.start for step in ranks) for ranks in zip(*on_ranks)][1:]


def mean_input(case: Case) -> float:
    return sum(map(_input, range(case.micro_batches))) / case.micro_batches


def _input(micro_batch: int) -> float:
    return 1 + micro_batch / 64


def seconds_on_clock(case: Case, by_speed: bool) -> float:
    """Returns the step of the slowest data-parallel rank."""
    ranks, speeds = case.pipeline_ranks, case.speeds
    rounds = min(shares_by_speed(case.layers, speeds)) if by_speed and ranks > 1 else case.layers // ranks
    placement = place_chunks("modular", ranks * rounds, ranks)
    bounds = split_evenly(case.layers, len(placement))
    if by_speed and ranks > 1:
        bounds = split_by_speed(case.layers, placement, speeds)
    layers = [end - start for start, end in pairwise(bounds)]
    rows = [speeds] if ranks > 1 else [(speed,) for speed in speeds]
    times = []
    for own, micro_batches in zip(rows, case.shares(by_speed)):
        spec = ProgramSpec(placement, "layered", micro_batches, micro_batches, zero_stage=0)
        costs = sized_costs(spec, Durations(FORWARD, BACKWARD), layers, own)
        times.append(simulate(spec, build_program(spec), costs).step_time)
    return max(times)


def measure_on_rank(case: Case, repetitions: int) -> OnRank:
    """Trains with equal work and with work by speed, in turns."""
    prepare_rank()
    ds_lgamp.install()
    engines = {name: _engine(case, name == BY_SPEED) for name in (EQUAL, BY_SPEED)}
    gc.collect()
    gc.freeze()
    steps: dict[str, list[Step]] = {name: [] for name in engines}
    for _ in range(repetitions + 1):
        for name, engine in engines.items():
            batch = _own_batch(case, case.shares(name == BY_SPEED))
            begin_together()
            start = time.monotonic()
            loss = engine.train_batch(iter(batch)).item()
            steps[name].append(Step(start, time.monotonic(), loss))
    return OnRank(steps, is_precise())


def _own_batch(case: Case, shares: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the micro-batches of this data-parallel rank."""
    data_rank = dist.get_rank() if case.data_ranks > 1 else 0
    first = sum(shares[:data_rank])
    numbers = range(first, first + shares[data_rank])
    return [(torch.full((1, ELEMENTS), _input(number)), torch.zeros(1)) for number in numbers]


def _engine(case: Case, by_speed: bool) -> Any:
    with quiet():
        module = PipelineModule(
            [LayerSpec(Layer, index, case.speeds) for index in range(case.layers)],
            num_stages=case.pipeline_ranks,
            loss_fn=loss_function,
            partition_method="uniform",
        )
        # A rate of zero keeps the numbers of all steps alike.
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": case.micro_batches // case.data_ranks,
                "gradient_clipping": 0.0,
                "steps_per_print": 1 << 30,
                "ds_lgamp": case.block(by_speed),
            },
        )
    return engine
