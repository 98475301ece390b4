"""Records what a rank does in some training steps, and writes it as a recording (:mod:`ds_lgamp.view.recording`).

The blocks that the executor times become intervals, and so does what is launched beside compute
(:mod:`ds_lgamp.partition.collectives`). On an accelerator, events in the streams give the times. Nothing waits for
them in a step: it is written at the end of a later one.
"""

import os
import socket
import sys
import time
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ds_lgamp.partition.agreement import everyone, raise_everywhere
from ds_lgamp.runtime.clocks import COMPUTE, DeviceClock, HostClock, Mark, Timing
from ds_lgamp.schedule.actions import AWAITED, COLLECTIVES, Action, awaited_by
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.version import __version__
from ds_lgamp.view.recording import (
    LANE_OF,
    Interval,
    RankRecording,
    Step,
    in_order,
    rank_file,
    rank_line,
    spec_fields,
    step_line,
    write_about,
)
from ds_lgamp.watch.this_rank import this_rank

_LAUNCHES = frozenset(AWAITED.values())


class Traced(Protocol):
    """The executor, as far as a trace needs it."""

    current: Action | None
    timing: Timing


class Trace:
    """Records the training steps ``first`` to ``last`` of one rank. All ranks have one.

    While it records, it takes the place of the executor's timing, and passes times on to it.

    Args:
        folder: where the recording goes. It may exist.
        first, last: numbers of training steps, from 1.
        rank: what the recording says about this rank.
        ranks: the number of all ranks.
        device: what computes.

    Raises OSError if ``folder`` cannot be made or written.
    """

    def __init__(
        self,
        folder: Path,
        first: int,
        last: int,
        rank: RankRecording,
        ranks: int,
        device: torch.device,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
        self._first, self._last = first, last
        self._output = _Output(folder, rank, ranks)
        self._clock = HostClock() if device.type == "cpu" else DeviceClock(device)
        self._memory = _memory_of(device)
        self._run: _Run | None = None
        """The step that is recorded."""
        self._unwritten: deque[_Step] = deque()
        # An engine may be freed before the process group ends.
        self._finish = weakref.finalize(self, _write_all, self._unwritten, self._output, self._clock)
        self._finish.atexit = False
        self._awaited: defaultdict[Action, list[_Flight]] = defaultdict(list)
        """What was launched and not awaited yet, by the action that launched it."""

    def begin(self, number: int, executor: Traced, spec: Callable[[], ProgramSpec]) -> None:
        """Records the training step that begins, if its number is one to record. Collective over all ranks in the first
        recorded step.

        Args:
            executor: runs the step.
            spec: returns the spec of the step while that runs.
        """
        self._write_known()
        if not self._first <= number <= self._last or self._output.failed:
            return
        if not self._clock.runs:
            self._clock.start()
        self._run = _Run(_Step(number, self._clock.now()), executor, executor.timing, spec)
        executor.timing, this_rank.recorder = self, self

    def end(self) -> None:
        """Ends the step, if it is recorded."""
        if self._run is not None:
            step, spec = self._run.step, self._run.spec()
            step.end = self._clock.now()
            self.stop()
            self._output.spec = spec
            self._unwritten.append(step)
            self._write_known()

    def stop(self) -> None:
        """Stops recording. A step that has not ended has failed; it is forgotten."""
        if self._run is not None:
            self._run.executor.timing, this_rank.recorder = self._run.instead, None
            self._run = None

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Records nothing inside the block, in which the script evaluates between two calls of a step."""
        run = self._run
        self.stop()
        try:
            yield
        finally:
            if run is not None:
                self._run = run
                run.executor.timing, this_rank.recorder = self, self

    def close(self) -> None:
        """Writes what is left. The device has come to its end."""
        self._finish()

    def _write_known(self) -> None:
        """Writes the steps whose times are known."""
        while self._unwritten and self._unwritten[0].is_known(self._clock):
            self._output.write(self._unwritten.popleft().read(self._clock))

    def time(self, kind: str) -> AbstractContextManager[None]:
        """Times the block as ``kind``, for the recording and for whatever the executor had for timing."""
        assert self._run is not None, "it takes the place of the executor's timing while it records"
        return _Block(self, kind, self._run.instead.time(kind))

    def launch(self, lane: str, moved: int) -> "_Flight":
        """Records a launch of the current action."""
        assert self._run is not None, "it listens while it records"
        action = self._run.executor.current
        # The host's own threads have no stream.
        flight = _Flight(lane, action, moved, time.perf_counter if lane == "host update" else self._clock.now)
        self._run.step.flights.append(flight)
        if action is not None and action.kind in _LAUNCHES:
            self._awaited[action].append(flight)
        return flight

    def end_block(self, kind: str, start: Mark) -> None:
        """Records a block of ``kind`` that ends now."""
        if self._run is None:
            return
        step, action, now = self._run.step, self._run.executor.current, self._clock.now()
        step.blocks.append((kind, action, start, now))
        if kind in COMPUTE:
            step.memory.append((now, self._memory()))
        elif action is not None and action.kind in AWAITED:
            for flight in self._awaited.pop(awaited_by(action), ()):
                flight.end()

    def now(self) -> Mark:
        return self._clock.now()


class _Block(AbstractContextManager):
    __slots__ = ("_inner", "_kind", "_start", "_trace")

    def __init__(self, trace: Trace, kind: str, inner: AbstractContextManager) -> None:
        self._trace, self._kind, self._inner = trace, kind, inner

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._start = self._trace.now()

    def __exit__(self, *failure: Any) -> None:
        self._trace.end_block(self._kind, self._start)
        self._inner.__exit__(*failure)


class _Flight:
    """A launch beside compute. The first call of :meth:`end` counts."""

    __slots__ = ("_now", "action", "lane", "moved", "over", "start")

    def __init__(self, lane: str, action: Action | None, moved: int, now: Callable[[], Mark]) -> None:
        self.lane, self.action, self.moved, self._now = lane, action, moved, now
        self.start: Mark = now()
        self.over: Mark = None

    def begin(self) -> None:
        self.start = self._now()

    def end(self) -> None:
        if self.over is None:
            self.over = self._now()


class _Run(NamedTuple):
    """What is recorded now."""

    step: "_Step"
    executor: Traced
    instead: Timing
    """The executor's own timing."""
    spec: Callable[[], ProgramSpec]


class _Step:
    """A step while its times may be unknown."""

    def __init__(self, number: int, start: Mark) -> None:
        self.number, self.start = number, start
        self.end: Mark = None
        self.blocks: list[tuple[str, Action | None, Mark, Mark]] = []
        self.flights: list[_Flight] = []
        self.memory: list[tuple[Mark, int]] = []

    def is_known(self, clock: HostClock) -> bool:
        ends = (self.end, *(flight.over for flight in self.flights))
        return all(mark is not None and clock.is_past(mark) for mark in ends)

    def read(self, clock: HostClock) -> Step:
        """Returns the step in seconds. What has no end lasts until the end of the step."""
        start = clock.base_on(self.start)
        memory = [(clock.seconds(mark), alive) for mark, alive in self.memory]
        return Step(self.number, start, clock.seconds(self.end), in_order(self._intervals(clock)), memory)

    def _intervals(self, clock: HostClock) -> Iterator[Interval]:
        for kind, action, begun, ended in self.blocks:
            lane = "compute" if kind in COMPUTE else "wait"
            yield Interval(
                lane, kind if action is None else _name(action), clock.seconds(begun), clock.seconds(ended), kind
            )
        for flight in self.flights:
            lane, begin = flight.lane, clock.seconds(flight.start)
            if flight.action is not None:
                kind = AWAITED.get(flight.action.kind, flight.action.kind)
                lane = LANE_OF[kind] if kind in COLLECTIVES else lane
            end = clock.seconds(self.end if flight.over is None else flight.over)
            name = lane if flight.action is None else _name(flight.action)
            yield Interval(lane, name, begin, max(begin, end), bytes=flight.moved)


@cache
def _name(action: Action) -> str:
    """Returns the text form of an action. The next step has the same ones."""
    return str(action)


def _write_all(steps: "deque[_Step]", output: "_Output", clock: HostClock) -> None:
    while steps:
        output.write(steps.popleft().read(clock))


def _memory_of(device: torch.device) -> Callable[[], int]:
    """Returns a function that reads the bytes alive on ``device``; on a CPU, all bytes of the process."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        if not hasattr(module, "memory_stats_as_nested_dict"):
            return lambda: module.memory_allocated(device)
        # memory_allocated would flatten and sort all the allocator's statistics each time.
        return lambda: module.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"]
    # Much faster than psutil, which DeepSpeed asks.
    file, page = os.open("/proc/self/statm", os.O_RDONLY), os.sysconf("SC_PAGE_SIZE")

    def resident() -> int:
        return int(os.pread(file, 128, 0).split()[1]) * page

    weakref.finalize(resident, os.close, file)
    return resident


class _Output:
    """Writes the steps of a rank, each as soon as it is given. Warns if it cannot, and training goes on."""

    failed = False
    spec: ProgramSpec
    """That of the last step."""

    def __init__(self, folder: Path, rank: RankRecording, ranks: int) -> None:
        self._folder, self._rank, self._ranks = folder, rank, ranks
        self._path = rank_file(folder, rank.rank)
        self._begun = False

    def write(self, step: Step) -> None:
        if self.failed:
            return
        try:
            if not self._begun:
                self._begin()
            with open(self._path, "a") as file:
                file.write(step_line(step))
        except OSError as error:
            self.failed = True
            warnings.warn(f"the trace of rank {self._rank.rank} ends, and training goes on: {error}", stacklevel=1)

    def _begin(self) -> None:
        self._begun = True
        if self._rank.rank == 0:
            write_about(self._folder, "measured", spec_fields(self.spec), __version__, self._ranks)
        self._path.write_text(rank_line(self._rank))


class Asked(Protocol):
    """A block, as far as it asks for a trace."""

    @property
    def trace(self) -> str | None: ...

    @property
    def traced_steps(self) -> tuple[int, int]: ...


def trace_if_asked(
    settings: Asked, pipeline_rank: int, data_rank: int, device: torch.device, error: type[Exception]
) -> Trace | None:
    """Returns the trace for which a block asks; None if it asks for none. Collective over all ranks if it does.

    Raises ``error`` on every rank if one of them cannot write, or if another engine does.
    """
    if settings.trace is None:
        return None
    first, last = settings.traced_steps
    words = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    own = RankRecording(dist.get_rank(), pipeline_rank, data_rank, socket.gethostname(), words)
    folder, trace, trouble = Path(settings.trace).resolve(), None, None
    if folder in this_rank.traces:
        trouble = "where another engine of the script records"
    else:
        try:
            trace = this_rank.traces[folder] = Trace(folder, first, last, own, dist.get_world_size(), device)
        except OSError as failure:
            trouble = f"which cannot be written ({failure.strerror})"
    complaint = None if trouble is None else f"ds_lgamp.trace is '{settings.trace}', {trouble}; use another folder"
    raise_everywhere(complaint, error)
    own.begun = everyone(time.time())[0]
    if own.rank == 0:
        print(f"ds_lgamp: steps {first} to {last} are recorded in {settings.trace}", file=sys.stderr)
    return trace
