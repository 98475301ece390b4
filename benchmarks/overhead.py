"""Measures the cost of the engine itself: time per action with almost no compute, and start-up seconds.

A chunk multiplies four numbers by its parameter. The engine alternates with a bare loop, which makes only the torch
calls that every implementation needs: each chunk's forward pass without a graph, its recomputation and its backward
pass, in the same number and order. Without recomputation, the bare loop is a script's own: one forward and one backward
of all chunks for each micro-batch. Engine time per action is the difference of their CPU times, divided by the number
of actions of the rank's program. It includes the engine's copies of inputs and its handling of random generators. With
several pipeline ranks it also includes its calls to send, receive and wait.

Three more loops run for comparison. The first does the same passes through PyTorch's own recomputation. The second
sends the messages alone, all at once. The third sends them in the program's order, so that they wait for each other.

CPU times count only the thread that executes the program. Times by the clock also include the waits for messages and
the work of the transport's thread. The executor handles the same generators as under DeepSpeed: torch's, Python's and
NumPy's. Compute is so small that absolute times depend on the machine. The benchmark does not include what DeepSpeed's
``train_batch`` adds to a step.
"""

import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter, thread_time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from benchmarks.record import OURS, REPETITIONS, Config, Record, begin
from benchmarks.virtual import bare, chunk
from ds_lgamp.integrations.deepspeed.model.recomputation import layer_sources
from ds_lgamp.partition.policy import UnitParameter, ZeroPolicy
from ds_lgamp.partition.zero_partition import build_partition
from ds_lgamp.runtime.batch import BatchState, Calls, Position, Storage
from ds_lgamp.runtime.chunk import Chunk
from ds_lgamp.runtime.edges import pipeline_links
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.schedule.actions import COMPUTE, Action, Kind
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_rank_program
from ds_lgamp.schedule.spec import ProgramSpec
from testing.ranks import run_on_ranks

NAME = "overhead"
BARE, CHECKPOINT, MESSAGES, PIPELINE = "bare loop", "torch.utils.checkpoint", "bare messages", "bare pipeline"
STEPS = 40
"""Steps that are timed together."""
SIZE = 4
DEVICE = torch.device("cpu")

ENGINE = {"cpu": "engine time per action", "clock": "engine time per action by the clock, waits included"}
"""Metrics by kind of time."""

Step = Callable[[], list[torch.Tensor]]
"""Makes one step and returns the losses that this rank knows."""

STARTS = {
    "pass": ("Python", ["-c", "pass"]),
    "import ds_lgamp": (OURS, ["-c", "import ds_lgamp"]),
    "ds_lgamp schedule --help": (OURS, ["-m", "ds_lgamp", "schedule", "--help"]),
    "import deepspeed": ("DeepSpeed", ["-c", "import deepspeed"]),
    "import deepspeed and the engine": (
        OURS,
        ["-c", "import deepspeed, ds_lgamp.integrations.deepspeed.engine.pipeline_engine"],
    ),
}
"""By what the interpreter loads: the contender, and the interpreter's arguments."""


class Setting(NamedTuple):
    """A layered program on modular chunks, and the limit of engine time per action in microseconds."""

    text: str
    pipeline_ranks: int
    chunks_per_rank: int
    micro_batches: int
    limit: float
    recomputes: bool = True

    @property
    def spec(self) -> ProgramSpec:
        placement = place_chunks("modular", self.chunks_per_rank * self.pipeline_ranks, self.pipeline_ranks)
        counts = self.micro_batches, self.micro_batches
        return ProgramSpec(placement, "layered", *counts, zero_stage=3, recomputes=self.recomputes)


SETTINGS = (
    Setting("P1 W1, transport excluded", 1, 8, 16, limit=20),
    Setting("P1 W1, without recomputation", 1, 8, 16, limit=20, recomputes=False),
    Setting("P2 W1, with transport", 2, 4, 16, limit=50),
)


class Time(NamedTuple):
    """Microseconds per action."""

    clock: float
    cpu: float
    """CPU time of the executing thread."""


class Timed(NamedTuple):
    """Times of one rank."""

    actions: int
    contenders: dict[str, list[Time]]
    """Times by contender and repetition."""

    def engine(self, kind: str, contender: str = OURS) -> list[float]:
        """Engine time: a contender's minus the bare loop's, by ``clock`` or ``cpu``."""
        pairs = zip(self.contenders[contender], self.contenders[BARE])
        return [getattr(whole, kind) - getattr(bare, kind) for whole, bare in pairs]

    def floor(self, kind: str) -> float | None:
        """The median of what does the same without an engine: a bare pipeline, or torch's recomputation."""
        for contender in (PIPELINE, CHECKPOINT):
            if contender in self.contenders:
                return statistics.median(self.engine(kind, contender))
        return None


def run(
    settings: Sequence[Setting] = SETTINGS,
    steps: int = STEPS,
    starts: Mapping[str, tuple[str, list[str]]] = STARTS,
    repetitions: int = REPETITIONS,
) -> Record:
    """Times every setting, then every start."""
    record = begin(NAME)
    for setting in settings:
        timed = time_setting(setting, steps, repetitions)
        config: Config = {
            "pipeline_ranks": setting.pipeline_ranks,
            "chunks_per_rank": setting.chunks_per_rank,
            "micro_batches": setting.micro_batches,
            "recompute": "full" if setting.recomputes else "none",
            "actions": timed.actions,
        }
        for contender, times in timed.contenders.items():
            record.add(contender, config, "whole step per action", [time.clock for time in times], "us")
            record.add(contender, config, "CPU time per action", [time.cpu for time in times], "us")
        for kind, metric in ENGINE.items():
            found, floor = timed.engine(kind), timed.floor(kind)
            record.add(OURS, config, metric, found, "us")
            text = f"{metric}, {setting.text}, us"
            record.aim(text, statistics.median(found), setting.limit, floor=floor, samples=found)
    for start, seconds in time_starts(starts, repetitions).items():
        record.add(starts[start][0], {"start": start}, "fresh interpreter", seconds, "s")
    return record


def time_setting(setting: Setting, steps: int = STEPS, repetitions: int = REPETITIONS) -> Timed:
    """Returns the times of the pipeline rank with the largest engine time per action."""
    on_ranks = run_on_ranks(setting.pipeline_ranks, _time_on_rank, setting.spec, steps, repetitions)
    # Compares CPU times. Ranks of one pipeline wait for each other, so their times by the clock differ little.
    return max(on_ranks, key=lambda timed: statistics.median(timed.engine("cpu")))


def time_starts(starts: Mapping[str, tuple[str, list[str]]], repetitions: int = REPETITIONS) -> dict[str, list[float]]:
    """Times fresh interpreters until they exit, in seconds. They alternate; the first round reads files from the disk
    and does not count."""
    seconds: dict[str, list[float]] = {start: [] for start in starts}
    for _ in range(repetitions + 1):
        for start, (_, arguments) in starts.items():
            begun = perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
            seconds[start].append(perf_counter() - begun)
    return {start: counted for start, (_, *counted) in seconds.items()}


def _time_on_rank(spec: ProgramSpec, steps: int, repetitions: int) -> Timed:
    """Times all contenders on one rank. They alternate; the first round warms up and does not count."""
    rank = dist.get_rank()
    program = build_rank_program(spec, rank)
    contenders = {OURS: engine_step(spec, rank, program), BARE: bare_step(spec, rank)}
    assert contenders[OURS]() == contenders[BARE](), "engine and bare loop compute different losses"
    if spec.recomputes:
        contenders[CHECKPOINT] = checkpoint_step(spec, rank)
    if spec.pipeline_ranks > 1:
        contenders[MESSAGES] = message_step(spec, rank, program)
        contenders[PIPELINE] = pipeline_step(spec)
    per_action = 1e6 / (steps * len(program))
    timed: dict[str, list[Time]] = {name: [] for name in contenders}
    for _ in range(repetitions + 1):
        for name, step in contenders.items():
            clock, cpu = _seconds(step, steps)
            timed[name].append(Time(clock * per_action, cpu * per_action))
    return Timed(len(program), {name: counted for name, (_, *counted) in timed.items()})


def _seconds(step: Step, steps: int) -> tuple[float, float]:
    """Seconds by the clock, and CPU seconds of this thread."""
    dist.barrier()
    clock, cpu = perf_counter(), thread_time()
    for _ in range(steps):
        step()
    return perf_counter() - clock, thread_time() - cpu


def engine_step(spec: ProgramSpec, rank: int, program: Sequence[Action]) -> Step:
    """A step of one batch through the executor."""
    parameters = _parameters(spec, rank)
    groups = [dist.new_group([member]) for member in range(spec.pipeline_ranks)]
    partition = build_partition(
        {chunk: [UnitParameter(str(chunk), parameter, 0)] for chunk, parameter in parameters.items()},
        [],
        ZeroPolicy(groups[rank], spec.zero_stage),
        DEVICE,
    )

    def update() -> None:
        partition.finish_gradients()
        partition.drop_gradients()

    executor = Executor(
        Position(spec.placement, rank),
        {chunk: Chunk([partial(_multiplied, parameter, False)], chunk) for chunk, parameter in parameters.items()},
        Storage(partition),
        pipeline_links([list(range(spec.pipeline_ranks))], spec.placement, DEVICE),
        Calls(_loss, update),
        layer_sources(DEVICE),
    )
    inputs = torch.ones(SIZE)
    # The other contenders recompute the last chunk too.
    whole = [action._replace(recomputed=spec.recomputes and action.kind in COMPUTE) for action in program]

    def step() -> list[torch.Tensor]:
        with executor.run_batch(BatchState(spec.micro_batches, lambda index: (inputs, inputs))):
            executor.run(whole)
        return executor.losses

    return step


def bare_step(spec: ProgramSpec, rank: int) -> Step:
    """A step that computes only the chunks of a rank. It replaces the messages of other ranks by constants."""
    layers, inputs, gradient = _loop(spec, rank)
    if not spec.recomputes:
        return partial(_train_each, [layer for _, layer in layers], inputs, gradient, spec.micro_batches)

    def step() -> list[torch.Tensor]:
        stored, results = [], [inputs] * spec.micro_batches
        for _, layer in layers:
            stored.append(results)
            with torch.no_grad():
                results = [layer(value) for value in results]
        gradients = [gradient] * spec.micro_batches
        for (needs_gradient, layer), values in zip(reversed(layers), reversed(stored)):
            leaves = []
            for value, received in zip(values, gradients):
                leaves.append(value.detach().requires_grad_(needs_gradient))
                torch.autograd.backward(layer(leaves[-1]), received)
            gradients = [leaf.grad for leaf in leaves]
        return results if rank == spec.loss_rank else []

    return step


def _train_each(
    layers: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    inputs: torch.Tensor,
    gradient: torch.Tensor,
    micro_batches: int,
) -> list[torch.Tensor]:
    """Makes the forward and the backward of each micro-batch in turn. Returns the losses."""
    losses = []
    for _ in range(micro_batches):
        value = inputs
        for layer in layers:
            value = layer(value)
        torch.autograd.backward(value, gradient)
        losses.append(value.detach())
    return losses


def checkpoint_step(spec: ProgramSpec, rank: int) -> Step:
    """The same step with PyTorch's own recomputation, which restores only torch's random states."""
    layers, inputs, gradient = _loop(spec, rank)

    def step() -> list[torch.Tensor]:
        stored, results = [], [inputs] * spec.micro_batches
        for needs_gradient, layer in layers:
            leaves = [value.detach().requires_grad_(needs_gradient) for value in results]
            results = [checkpoint(layer, leaf, use_reentrant=False) for leaf in leaves]
            stored.append((leaves, results))
        losses, gradients = results, [gradient] * spec.micro_batches
        for leaves, results in reversed(stored):
            for result, received in zip(results, gradients):
                torch.autograd.backward(result, received)
            gradients = [leaf.grad for leaf in leaves]
        return [loss.detach() for loss in losses] if rank == spec.loss_rank else []

    return step


def message_step(spec: ProgramSpec, rank: int, program: Sequence[Action]) -> Step:
    """A step that exchanges only the messages of one batch, in the program's order."""
    previous, following = (rank - 1) % spec.pipeline_ranks, (rank + 1) % spec.pipeline_ranks
    calls = {
        Kind.SEND_FORWARD: partial(dist.isend, group_dst=following, tag=0),
        Kind.RECV_FORWARD: partial(dist.irecv, group_src=previous, tag=0),
        Kind.SEND_BACKWARD: partial(dist.isend, group_dst=previous, tag=1),
        Kind.RECV_BACKWARD: partial(dist.irecv, group_src=following, tag=1),
    }
    messages = [calls[action.kind] for action in program if action.kind in calls]

    def step() -> list[torch.Tensor]:
        tensors = [torch.empty(SIZE) for _ in messages]
        for work in [start(tensor) for start, tensor in zip(messages, tensors)]:
            work.wait()
        return []

    return step


def pipeline_step(spec: ProgramSpec) -> Step:
    """A step of all torch and gloo calls that the program needs without recomputation, in its order. It waits for a
    receive where its tensor is used.

    Chunks take almost no time, so the step shows how long messages take.
    """
    chunks_per_rank = spec.chunks // spec.pipeline_ranks
    setting = chunk.Setting(
        spec.pipeline_ranks, chunks_per_rank, spec.micro_batches, forward=0, backward=0, elements=SIZE
    )
    loop = bare.BareLoop(setting, spec)

    def step() -> list[torch.Tensor]:
        loop.step()
        return loop.losses

    return step


def _loop(
    spec: ProgramSpec, rank: int
) -> tuple[list[tuple[bool, Callable[[torch.Tensor], torch.Tensor]]], torch.Tensor, torch.Tensor]:
    """Returns the layers of a rank, each with whether its input needs a gradient; an input; and the gradient of a
    result."""
    layers = [
        (chunk > 0, partial(_multiplied, parameter, chunk == spec.chunks - 1))
        for chunk, parameter in _parameters(spec, rank).items()
    ]
    return layers, torch.ones(SIZE), torch.ones(() if rank == spec.loss_rank else SIZE)


def _parameters(spec: ProgramSpec, rank: int) -> dict[int, Parameter]:
    """Parameters of this rank, by chunk."""
    return {chunk: Parameter(torch.ones(SIZE)) for chunk, owner in enumerate(spec.placement) if owner == rank}


def _multiplied(parameter: Parameter, last: bool, inputs: torch.Tensor) -> torch.Tensor:
    """The result of a chunk; the loss if it is the ``last``."""
    result = parameter * inputs
    return _loss(result, None) if last else result


def _loss(result: torch.Tensor, _labels: torch.Tensor | None) -> torch.Tensor:
    return result.sum()
