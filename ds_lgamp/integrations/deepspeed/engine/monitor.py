"""Measures training steps: for DeepSpeed's monitors and its log, and for ``ds_lgamp run --measure``, with or without a
block."""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils.logging import log_dist

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.engine.data import BatchLoader
from ds_lgamp.partition.agreement import anyone, everyone
from ds_lgamp.runtime.clocks import EXPOSED_WAITS, Stopwatch
from ds_lgamp.runtime.measure import CollectiveCounter, PeakMemory, live_tensors
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import ProgramSpec

_OF_PIPELINE = ("activation", "gradient", "send")
"""Waits for neighbours in the pipeline."""


class StepReport(NamedTuple):
    """The measurements of one step, over all ranks."""

    seconds: float
    """Duration on the slowest rank."""
    tokens_per_second: float
    """Elements of integer inputs per second; 0 if the inputs are not integers."""
    kinds: dict[str, float]
    """Seconds by kind of work and of exposed wait, averaged over the ranks."""
    bubble: float
    """The share of the step in which a rank neither computes nor waits for data, parameters, reductions or copies, as
    the mean of all ranks. It includes waits for neighbours in the pipeline and for slower ranks at the end, and the
    host's own work."""
    peak_bytes: float
    """Highest memory since the process began, on the rank that needs most. DeepSpeed's accelerator reports it:
    allocated device memory, or on the CPU the resident set of the process."""

    def events(self, engine: Any) -> list[tuple[str, float, int]]:
        """Returns the events for the monitors, as (name, value, samples). DeepSpeed itself adds loss and learning
        rate."""
        values = {
            "grad_norm": float(engine.get_global_grad_norm()),
            "tokens_per_second": self.tokens_per_second,
            "bubble": self.bubble,
            "peak_bytes": self.peak_bytes,
            **{f"exposed_wait_seconds/{kind}": self.kinds[kind] for kind in EXPOSED_WAITS},
        }
        return [(f"Train/Samples/{name}", value, engine.global_samples) for name, value in values.items()]

    def breakdown(self) -> str:
        """Returns the log line for ``wall_clock_breakdown``. Times are in milliseconds."""
        parts = [
            f"{'wait for ' if kind in EXPOSED_WAITS else ''}{kind}: {1000 * self.kinds[kind]:.2f}"
            for kind in self.kinds
        ]
        return f"time (ms) | train_batch: {1000 * self.seconds:.2f} | {' | '.join(parts)}"


class StepMonitor:
    """Measures the steps of an engine. Collective over all ranks once per step."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch

    def begin(self) -> None:
        # What a step that failed has left. Evaluations between two steps are not measured.
        self._stopwatch.read()
        self._stopwatch.running = True
        self._start = time.perf_counter()

    def finish(self, tokens: int, device: torch.device) -> StepReport:
        """Returns the report of the step that began last.

        Args:
            tokens: the number of tokens that this rank took in the step.
            device: holds the tensors that ranks exchange.
        """
        self._stopwatch.running = False
        kinds = self._stopwatch.read()
        seconds = time.perf_counter() - self._start
        own = torch.tensor(
            [seconds, tokens, get_accelerator().max_memory_allocated(), *kinds.values()],
            dtype=torch.float64,
            device=device,
        )
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own)
        table = torch.stack(gathered).cpu()
        slowest = float(table[:, 0].max())
        means = dict(zip(kinds, table[:, 3:].mean(0).tolist()))
        busy = sum(mean for kind, mean in means.items() if kind not in _OF_PIPELINE)
        bubble = max(0.0, 1 - busy / slowest)
        return StepReport(slowest, float(table[:, 1].sum()) / slowest, means, bubble, float(table[:, 2].max()))


def monitor_if_asked(engine: Any, stopwatch: Stopwatch) -> StepMonitor | None:
    """Returns a monitor on all ranks if any rank reports steps; otherwise None. Often only rank 0 reports, but all
    ranks measure. Collective over all ranks."""
    asked = anyone(engine.monitor.enabled or engine.wall_clock_breakdown())
    return StepMonitor(stopwatch) if asked else None


@contextmanager
def monitored(engine: Any, monitor: StepMonitor | None, loader: BatchLoader) -> Iterator[None]:
    """Measures the training step inside the block and publishes the report. Does nothing without a ``monitor``.
    Publishes nothing if the step fails."""
    if monitor is None:
        yield
        return
    loader.tokens = 0
    monitor.begin()
    yield
    _publish(engine, monitor.finish(loader.tokens, engine.device))


def _publish(engine: Any, report: StepReport) -> None:
    """Writes the report to the monitors on rank 0. Also writes it to the log if ``wall_clock_breakdown`` is set."""
    if engine.global_rank == 0 and engine.monitor.enabled:
        engine.monitor.write_events(report.events(engine))
    interval = engine.steps_per_print()
    if engine.wall_clock_breakdown() and interval is not None and engine.global_steps % interval == 0:
        log_dist(report.breakdown(), ranks=[0])


COUNTED_STEP = 3
"""The step, numbered from 0, that is counted instead of timed. By then, nothing happens for the first time."""


class TrainingMeasurement:
    """Records the loss and time of every ``train_batch`` of a script, and the traffic and memory of one."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._counted: dict[str, Any] = {}
        self._stock_train_batch: Callable[..., torch.Tensor] = PipelineEngine.train_batch

    def install(self) -> None:
        """Wraps the engine's ``train_batch`` for the rest of the process."""

        def train_batch(engine: PipelineEngine, *arguments: Any, **options: Any) -> torch.Tensor:
            return self._train_batch(engine, *arguments, **options)

        PipelineEngine.train_batch = train_batch

    def write(self, path: Path) -> None:
        """Writes the record as JSON to ``path`` on the first rank. Raises ConfigError if no step was counted."""
        if not self._counted:
            raise ConfigError(
                f"--measure {path} needs {COUNTED_STEP + 1} training steps or more, the script made "
                f"{len(self._losses)}; train longer"
            )
        if not self._counted["is_first_rank"]:
            return
        timed = [seconds for step, seconds in enumerate(self._seconds) if step > COUNTED_STEP] or self._seconds
        record = {
            "losses": self._losses,
            "step_seconds": statistics.median(timed),
            **{key: value for key, value in self._counted.items() if key != "is_first_rank"},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=2) + "\n")

    def _train_batch(self, engine: PipelineEngine, *arguments: Any, **options: Any) -> torch.Tensor:
        start = time.perf_counter()
        if len(self._losses) == COUNTED_STEP:
            loss = self._count(engine, *arguments, **options)
        else:
            loss = self._stock_train_batch(engine, *arguments, **options)
        self._losses.append(float(loss.mean()))
        self._seconds.append(time.perf_counter() - start)
        return loss

    def _count(self, engine: PipelineEngine, *arguments: Any, **options: Any) -> torch.Tensor:
        with PeakMemory(live_tensors()) as memory, CollectiveCounter() as counter:
            loss = self._stock_train_batch(engine, *arguments, **options)
        own = (counter.collectives(), counter.calls["send"], counter.bytes_sent.total(), memory.peak)
        collectives, messages, sent, peak = (max(values) for values in zip(*everyone(own)))
        self._counted = {
            "is_first_rank": dist.get_rank() == 0,
            "collectives_per_step": collectives,
            "messages_per_step": messages,
            "bytes_per_step": sent,
            "peak_bytes": peak,
            "bubble": simulated_bubble(engine),
        }
        return loss


def simulated_bubble(engine: PipelineEngine) -> float:
    """Returns the bubble of the engine's schedule as a fraction of the ideal step time. A stock engine runs 1F1B."""
    spec = getattr(engine, "program_spec", None)
    if spec is None:
        ranks = tuple(range(engine.num_stages))
        spec = ProgramSpec(ranks, "1f1b", engine.micro_batches, engine.micro_batches, zero_stage=0)
    return simulate(spec, build_program(spec)).bubble
