"""Measures what live states cost: ``python -m benchmarks run live``.

One engine without live states, one with them in memory (/dev/shm) and one with them on a disk (the system's folder for
temporary files) take turns to step. All layers sleep instead of computing, as the host does while a GPU computes, so
that the host has time for the copies. Gathers, reductions and the updates of Adam are real; the updates take the time
of a CPU. States on the disk are synced to it in every step.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.record import OURS, REPETITIONS, Config, Record, begin
from ds_lgamp.checkpoint.live_slot import read_header
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks

NAME = "live"
RANKS = 2
OFF, MEMORY, DISK = "without", f"{OURS}, in memory", f"{OURS}, on a disk"
LIMIT = 1.05
STEPS = 6
"""Steps of each engine in a repetition."""
STATES = 12
"""Bytes of the state of one parameter under Adam in fp32: the parameter and two moments."""


class Model(NamedTuple):
    layers: int = 8
    parameters: int = 500_000
    """Of each layer."""
    micro_batches: int = 4
    seconds: float = 0.004
    """Of a forward pass of one layer, and half of a backward pass."""

    @property
    def bytes_of_rank(self) -> float:
        """What a rank writes in a step: its shard of the state."""
        return STATES * self.layers * self.parameters / RANKS


class Measured(NamedTuple):
    """Of one rank, by contender."""

    steps: dict[str, list[float]]
    """Median seconds of a step, by repetition."""
    ends: dict[str, list[float]]
    """Median seconds that the end of a step takes on the main thread."""
    written: dict[str, int]
    """Bytes of the numbers in a state."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds, context.size = seconds, weight.numel()
        time.sleep(seconds)
        return inputs * 1

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        time.sleep(2 * context.seconds)
        return gradients[0], torch.full((context.size,), 1e-3), None


class Sleeping(torch.nn.Module):
    def __init__(self, parameters: int, seconds: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(parameters))
        self.seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(inputs, self.weight, self.seconds)


def run(model: Model | None = None, steps: int = STEPS, repetitions: int = REPETITIONS) -> Record:
    """Times all engines on two data-parallel ranks at stage 3."""
    model = model or Model()
    record = begin(NAME)
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as memory:
        with tempfile.TemporaryDirectory() as disk:
            found = run_on_ranks(RANKS, _time, {MEMORY: memory, DISK: disk}, model, steps, repetitions)
    enter(record, model, found)
    return record


def enter(record: Record, model: Model, found: list[Measured]) -> None:
    config: Config = {"ranks": RANKS, "MB": round(1e-6 * model.bytes_of_rank)}
    slowest = {
        name: [max(seconds) for seconds in zip(*(of.steps[name] for of in found))] for name in (OFF, MEMORY, DISK)
    }
    for name, seconds in slowest.items():
        record.add(name, config, "step", [second * 1000 for second in seconds], "ms")
    for name in (MEMORY, DISK):
        ends = [second * 1000 for of in found for second in of.ends[name]]
        record.add(name, config, "end of a step, main thread", ends, "ms")
        record.add(name, config, "written in a step", [1e-6 * of.written[name] for of in found], "MB")
        place = name.removeprefix(f"{OURS}, ")
        record.aim(f"step with live states {place} / without", median(slowest[name]) / median(slowest[OFF]), LIMIT)
        most = max(of.written[name] for of in found)
        record.aim(f"bytes of a live state {place} / formula", most / model.bytes_of_rank, 1.001)


def _time(folders: dict[str, str], model: Model, steps: int, repetitions: int) -> Measured:
    prepare_rank()
    engines = {name: _engine(model, folders.get(name)) for name in (OFF, MEMORY, DISK)}
    found = Measured({name: [] for name in engines}, {name: [] for name in folders}, {})
    for repetition in range(repetitions + 1):
        for name, engine in engines.items():
            ends: list[float] = []
            engine.lgamp.end_step = _timed(type(engine.lgamp).end_step.__get__(engine.lgamp), ends)
            seconds: list[float] = []
            step = _timed(lambda engine=engine: engine.train_batch(_batches(model)), seconds)
            for _ in range(steps):
                step()
            # Engines take turns, and one must not write for another.
            engine.finish_gathers()
            dist.barrier()
            if repetition:
                found.steps[name].append(median(seconds))
                if name in folders:
                    found.ends[name].append(median(ends))
    for name, folder in folders.items():
        found.written[name] = _written(Path(folder))
    return found


def _timed(call: Callable[[], object], seconds: list[float]) -> Callable[[], None]:
    def timed() -> None:
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)

    return timed


def _batches(model: Model) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return iter([(torch.ones(1, 1), torch.zeros(1, 1))] * model.micro_batches)


def _engine(model: Model, folder: str | None) -> Any:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    import ds_lgamp

    ds_lgamp.install()
    layers = [LayerSpec(Sleeping, model.parameters, model.seconds) for _ in range(model.layers)]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": model.micro_batches,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "ds_lgamp": {"layers_per_chunk": 1} | ({} if folder is None else {"live_checkpoint": folder}),
    }
    with quiet():
        module = PipelineModule(layers, num_stages=1, loss_fn=torch.nn.functional.mse_loss)
        return deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]


def _written(folder: Path) -> int:
    """Returns the bytes of the numbers in the newest state of this rank."""
    headers = []
    for path in folder.glob(f"*/{dist.get_rank()}-*.json"):
        with suppress(OSError):
            headers.append(read_header(path))
    newest = max(headers, key=lambda header: header.step)
    return sum(blob.length for blob in newest.blobs)
