"""What the engine itself costs: time per action where chunks compute next to nothing, and seconds until it is loaded.

A chunk multiplies four numbers by its parameter. Beside the executor runs a bare loop that makes those calls of torch
that nobody can do without: each chunk's forward pass without graph, its recomputation and its backward pass, in the
same number and order. They alternate. The difference of their CPU times, divided by the actions of the rank's program,
is the engine's own time per action: what it costs that a program is executed. What the engine does to be exact counts,
such as copies of inputs and looking after the random generators, and where several pipeline ranks take part, so do its
calls to send, receive and wait. Beside both, the same passes go through PyTorch's own recomputation. Only the thread
that executes the program counts. What passes while it sleeps until a message is there, and what the transport's own
thread does meanwhile, is in the times by the clock, which are shown beside. How long the messages alone take, a third
loop shows, all of them under way at once; a fourth has them wait for each other as the program does.

The executor looks after the generators it has under DeepSpeed: torch's, Python's and NumPy's. Compute is so small that
absolute times are of this machine; what DeepSpeed's ``train_batch`` adds around a step is not measured.
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
from ds_lgamp.integrations.deepspeed.engine.random_sources import layer_sources
from ds_lgamp.partition.flat_storage import UnitParameter
from ds_lgamp.partition.policy import ZeroPolicy
from ds_lgamp.partition.zero_partition import build_partition
from ds_lgamp.runtime.chunk import Chunk
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.runtime.links import ring_links
from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import ProgramSpec, build_rank_program
from testing.ranks import run_on_ranks

NAME = "overhead"
BARE, CHECKPOINT, MESSAGES, PIPELINE = "bare loop", "torch.utils.checkpoint", "bare messages", "bare pipeline"
STEPS = 40
"""Steps that are timed together."""
SIZE = 4
DEVICE = torch.device("cpu")

ENGINE = {"cpu": "engine time per action", "clock": "engine time per action by the clock, waits included"}
"""Metrics by the kind of time."""

Step = Callable[[], list[torch.Tensor]]
"""Makes one step and returns the losses this rank knows."""

STARTS = {
    "pass": ("Python", ["-c", "pass"]),
    "import ds_lgamp": (OURS, ["-c", "import ds_lgamp"]),
    "ds_lgamp schedule --help": (OURS, ["-m", "ds_lgamp", "schedule", "--help"]),
    "import deepspeed": ("DeepSpeed", ["-c", "import deepspeed"]),
    "import deepspeed and the engine": (
        OURS,
        ["-c", "import deepspeed, ds_lgamp.integrations.deepspeed.engine.engine"],
    ),
}
"""Whose they are, and the arguments of an interpreter, by what it loads."""


class Setting(NamedTuple):
    """A layered program on modular chunks, and how many microseconds of engine time its actions may take."""

    text: str
    pipeline_ranks: int
    chunks_per_rank: int
    micro_batches: int
    limit: float

    @property
    def spec(self) -> ProgramSpec:
        placement = place_chunks("modular", self.chunks_per_rank * self.pipeline_ranks, self.pipeline_ranks)
        return ProgramSpec(placement, "layered", self.micro_batches, self.micro_batches, zero_stage=3)


SETTINGS = (
    Setting("P1 W1, transport excluded", 1, 8, 16, limit=20),
    Setting("P2 W1, with transport", 2, 4, 16, limit=50),
)


class Time(NamedTuple):
    """Microseconds per action."""

    clock: float
    cpu: float
    """Of the executing thread."""


class Timed(NamedTuple):
    """One rank's times."""

    actions: int
    contenders: dict[str, list[Time]]
    """By repetition."""

    def engine(self, kind: str) -> list[float]:
        """Ours without the bare loop's, by the ``clock`` or ``cpu``."""
        pairs = zip(self.contenders[OURS], self.contenders[BARE])
        return [getattr(whole, kind) - getattr(bare, kind) for whole, bare in pairs]


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
            "actions": timed.actions,
        }
        for contender, times in timed.contenders.items():
            record.add(contender, config, "whole step per action", [time.clock for time in times], "us")
            record.add(contender, config, "CPU time per action", [time.cpu for time in times], "us")
        for kind, metric in ENGINE.items():
            record.add(OURS, config, metric, timed.engine(kind), "us")
            record.aim(f"{metric}, {setting.text}, us", statistics.median(timed.engine(kind)), setting.limit)
    for start, seconds in time_starts(starts, repetitions).items():
        record.add(starts[start][0], {"start": start}, "fresh interpreter", seconds, "s")
    return record


def time_setting(setting: Setting, steps: int = STEPS, repetitions: int = REPETITIONS) -> Timed:
    """The pipeline rank whose engine takes the longest per action."""
    on_ranks = run_on_ranks(setting.pipeline_ranks, _time_on_rank, setting.spec, steps, repetitions)
    # Ranks of one pipeline wait for each other, so that by the clock they differ little.
    return max(on_ranks, key=lambda timed: statistics.median(timed.engine("cpu")))


def time_starts(starts: Mapping[str, tuple[str, list[str]]], repetitions: int = REPETITIONS) -> dict[str, list[float]]:
    """Seconds until fresh interpreters have ended, alternating; a round that reads files from disk is not counted."""
    seconds: dict[str, list[float]] = {start: [] for start in starts}
    for _ in range(repetitions + 1):
        for start, (_, arguments) in starts.items():
            begun = perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
            seconds[start].append(perf_counter() - begun)
    return {start: counted for start, (_, *counted) in seconds.items()}


def _time_on_rank(spec: ProgramSpec, steps: int, repetitions: int) -> Timed:
    """The contenders alternate; a round that warms up is not counted."""
    rank = dist.get_rank()
    program = build_rank_program(spec, rank)
    contenders = {OURS: engine_step(spec, rank, program), BARE: bare_step(spec, rank)}
    assert contenders[OURS]() == contenders[BARE](), "engine and bare loop compute different losses"
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
    """By the clock, and of this thread's CPU time."""
    dist.barrier()
    clock, cpu = perf_counter(), thread_time()
    for _ in range(steps):
        step()
    return perf_counter() - clock, thread_time() - cpu


def engine_step(spec: ProgramSpec, rank: int, program: Sequence[Action]) -> Step:
    """One batch through the executor."""
    parameters = _parameters(spec, rank)
    groups = [dist.new_group([member]) for member in range(spec.pipeline_ranks)]
    partition = build_partition(
        {chunk: [UnitParameter(str(chunk), parameter, 0)] for chunk, parameter in parameters.items()},
        [],
        ZeroPolicy(groups[rank], spec.zero_stage),
        spec.resident_chunks,
        DEVICE,
    )
    executor = Executor(
        spec.placement,
        rank,
        {chunk: Chunk([partial(_multiplied, parameter, False)], chunk) for chunk, parameter in parameters.items()},
        partition,
        ring_links([list(range(spec.pipeline_ranks))], DEVICE),
        _loss,
        lambda: None,
        layer_sources(DEVICE),
    )
    inputs = torch.ones(SIZE)

    def step() -> list[torch.Tensor]:
        with executor.batch(spec.micro_batches, lambda index: (inputs, inputs)):
            executor.run(program)
        return executor.losses

    return step


def bare_step(spec: ProgramSpec, rank: int) -> Step:
    """What a rank's chunks compute in one batch. What other ranks would send is made up."""
    layers, inputs, gradient = _loop(spec, rank)

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


def checkpoint_step(spec: ProgramSpec, rank: int) -> Step:
    """The same through PyTorch's own recomputation, which restores torch's random states alone."""
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
    """The messages of one batch, in the program's order, and nothing else."""
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
    """The calls of torch and gloo that the program needs without recomputation, in its order, every receive awaited
    where its tensor is used: chunks that take no time leave what passes until messages have arrived."""
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
    """What a loop without engine works on: the rank's layers, each with whether its input needs a gradient; an input,
    and the gradient of a result."""
    layers = [
        (chunk > 0, partial(_multiplied, parameter, chunk == spec.chunks - 1))
        for chunk, parameter in _parameters(spec, rank).items()
    ]
    return layers, torch.ones(SIZE), torch.ones(() if rank == spec.loss_rank else SIZE)


def _parameters(spec: ProgramSpec, rank: int) -> dict[int, Parameter]:
    """By chunk of this rank."""
    return {chunk: Parameter(torch.ones(SIZE)) for chunk, owner in enumerate(spec.placement) if owner == rank}


def _multiplied(parameter: Parameter, last: bool, inputs: torch.Tensor) -> torch.Tensor:
    """A chunk's result; the loss, if it is the ``last``."""
    result = parameter * inputs
    return _loss(result, None) if last else result


def _loss(result: torch.Tensor, _labels: torch.Tensor | None) -> torch.Tensor:
    return result.sum()
