"""Measures what it costs to record steps (``ds_lgamp.trace``): ``python -m benchmarks run tracing``.

One training records every second step. A step counts from its call to its loss, the slowest rank's, with what is
written to disk. CPU time is that of all threads of all ranks: those of gloo note the ends of collectives.

These ratios have a wide spread on a machine that does other things. So the recorder is also timed alone, on as many
intervals as the busiest rank has in a step, until they are in their file. The share is that time of the CPU time of a
step that is not recorded.
"""

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, process_time, thread_time
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.contenders import Layout
from benchmarks.model import ModelSize
from benchmarks.record import OURS, REPETITIONS, Record, begin
from ds_lgamp.runtime.clocks import Stopwatch
from ds_lgamp.runtime.trace import Trace
from ds_lgamp.schedule.actions import Action
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.view.recording import RankRecording, read_recording
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks

NAME = "tracing"
SIZE = ModelSize(blocks=8, width=256, sequence=128)
LAYOUTS = (Layout(2, 1, SIZE), Layout(1, 2, SIZE))
MICRO_BATCHES, WARM_UP, PAIRS = 8, 2, 4
"""PAIRS: of steps in a turn, one of them recorded."""
LIMIT = 0.005
WAYS = {False: OURS, True: f"{OURS}, recorded"}
CPU = torch.device("cpu")


class Times(NamedTuple):
    """Seconds of a turn's steps on one rank, by whether they were recorded."""

    clock: dict[bool, float]
    cpu: dict[bool, float]


class Found(NamedTuple):
    """What one rank measured."""

    turns: list[Times]
    intervals: int
    """In a step."""
    alone: list[float]
    """Seconds to record as many intervals without a step."""


def run(layouts: Sequence[Layout] = LAYOUTS, pairs: int = PAIRS, turns: int = REPETITIONS) -> Record:
    """Measures every layout."""
    record = begin(NAME)
    for layout in layouts:
        with tempfile.TemporaryDirectory() as folder:
            ranks = layout.pipeline_ranks * layout.data_ranks
            enter(record, layout, pairs, run_on_ranks(ranks, _measure, layout, pairs, turns, folder))
    return record


def enter(record: Record, layout: Layout, pairs: int, by_rank: Sequence[Found]) -> None:
    """Enters the rows of one layout."""
    config = layout.config(MICRO_BATCHES)
    turns = list(zip(*(found.turns for found in by_rank)))
    clock = {way: [max(rank.clock[way] for rank in turn) / pairs for turn in turns] for way in WAYS}
    cpu = {way: [sum(rank.cpu[way] for rank in turn) / pairs for turn in turns] for way in WAYS}
    for way, name in WAYS.items():
        record.add(name, config, "step", [1000 * seconds for seconds in clock[way]], "ms")
    for kind, seconds in (("step", clock), ("CPU time", cpu)):
        ratios = [traced / plain for traced, plain in zip(seconds[True], seconds[False])]
        record.add(WAYS[True], config, f"{kind}, recorded / not", ratios, "ratio")
    busiest = max(by_rank, key=lambda found: found.intervals)
    each = [1e6 * seconds / busiest.intervals for seconds in busiest.alone]
    record.add(WAYS[True], config, f"CPU time of an interval, {busiest.intervals} in a step", each, "us")
    # Of one rank.
    step = statistics.median(cpu[False]) / len(by_rank)
    shares = [seconds / step for seconds in busiest.alone]
    record.add(WAYS[True], config, "share of the CPU time of a step", shares, "ratio")
    text = f"share of recording in the CPU time of a step, P{layout.pipeline_ranks} W{layout.data_ranks}"
    record.aim(text, statistics.median(shares), LIMIT)


def _measure(layout: Layout, pairs: int, turns: int, folder: str) -> Found:
    from benchmarks.contenders.lgamp import Layered

    prepare_rank()
    training = Layered(layout, zero_stage=3, resident_chunks=2)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = RankRecording(rank, rank // layout.data_ranks, rank % layout.data_ranks)
    trace = Trace(Path(folder), 1, 1 << 30, own, ranks, CPU)
    training.engine.lgamp.executor.trace = trace
    for step in range(WARM_UP):
        training.step(step, MICRO_BATCHES)
    told = []
    for _ in range(turns):
        times = Times({False: 0.0, True: 0.0}, {False: 0.0, True: 0.0})
        for pair in range(pairs):
            for recorded in (False, True) if pair % 2 else (True, False):
                training.engine.lgamp.executor.trace = trace if recorded else None
                clock, cpu = perf_counter(), process_time()
                training.step(pair, MICRO_BATCHES)
                times.clock[recorded] += perf_counter() - clock
                times.cpu[recorded] += process_time() - cpu
        told.append(times)
    trace.close()
    dist.barrier()
    intervals = len(read_recording(Path(folder)).ranks[rank].steps[-1].intervals)
    return Found(told, intervals, _alone(trace, training.engine.lgamp.own_spec, intervals, turns))


def _alone(trace: Trace, spec: ProgramSpec, intervals: int, turns: int) -> list[float]:
    executor = SimpleNamespace(current=Action.parse("F3.5"), timing=Stopwatch(CPU))
    seconds = []
    for _ in range(turns):
        begun = thread_time()
        trace.begin(1, executor, lambda: spec)
        for _ in range(intervals):
            with executor.timing.time("forward"):
                pass
        trace.end()
        seconds.append(thread_time() - begun)
    return seconds
