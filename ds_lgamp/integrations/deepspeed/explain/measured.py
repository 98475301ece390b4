"""``ds_lgamp run --measure``: measures a training run with or without a ``ds_lgamp`` block."""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.engine.door import LgampDoor
from ds_lgamp.partition.agreement import everyone
from ds_lgamp.runtime.measure import CollectiveCounter, PeakMemory, live_tensors
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import ProgramSpec

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
    if isinstance(engine, LgampDoor):
        spec = engine.program_spec
    else:
        ranks = tuple(range(engine.num_stages))
        spec = ProgramSpec(ranks, "1f1b", engine.micro_batches, engine.micro_batches, zero_stage=0)
    return simulate(spec, build_program(spec)).bubble
