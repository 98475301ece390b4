"""Times steps by the memory that recomputation may leave to activations: ``python -m benchmarks run recomputation``.

ds_lgamp trains with full recomputation, within budgets, and without any, beside FSDP2 with every kind of recomputation
that torch has: whole blocks, every second block, all but products, none, and what its compiler chooses within a budget.
All take turns on the same ranks, but for compiled ones, whose code torch shares among equal blocks: each of these has
processes of its own, with ds_lgamp beside it.

Peaks are counted at dispatch in other steps. Compiled code does not pass torch's dispatcher. Its peak is that of FSDP2
without recomputation, and what torch's profiler sees beyond that one's. The profiler alone does not see what gloo's
threads free.
"""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from operator import truediv
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.contenders import Contender, Layout
from benchmarks.contenders.door import Script, reference
from benchmarks.contenders.lgamp import Layered
from benchmarks.contenders.recomputing import EVERY, GptSharded, LlamaSharded
from benchmarks.model import ModelSize, Reference, reference_losses
from benchmarks.record import OURS, PART, REPETITIONS, Config, Record, begin
from benchmarks.training import Duration, compete
from ds_lgamp.runtime.measure import PeakMemory, live_tensors, storage_of
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks

NAME = "recomputation"
MICRO_BATCHES = 8
SIZE = ModelSize(blocks=8, width=256, sequence=128, vocabulary=1024)
RANKS = 2
FULL, NONE, HALF = f"{OURS}, full", f"{OURS}, none", f"{OURS}, half of none's activations"
ONE_BY_ONE = f"{OURS}, none, one micro-batch after another"
"""In the order of a script, with as many gathers: only one micro-batch is alive."""
SHARES = (0.25, 0.75)
"""Further budgets: shares of what none takes beyond full."""
COMPILED_BUDGETS = (0.5,)
"""Values of torch's activation_memory_budget."""
TOGETHER = "all"
"""The group of contenders that take turns, apart from compiled ones."""
WARM_UP, SECONDS = 2, 1200
BUDGET, PEAK, STEP, CPU = "budget", "peak", "step", "CPU"
LIMIT = 1.02
"""Largest step, relative to that with the next smaller budget: steps scatter."""
OVER = 1.01
"""Largest peak, relative to its budget."""


class Held(NamedTuple):
    """Bytes of a rank."""

    state: int
    """Between steps."""
    peak: int


class Model(NamedTuple):
    """A model that all train."""

    name: str
    ours: Callable[..., Any]
    """Builds ds_lgamp from a layout and the keys of recomputation."""
    sharded: Callable[..., Any]
    """Builds FSDP2 from a layout, a kind of recomputation and a budget of the compiler."""
    reference: Reference

    def own(self, name: str, **keys: Any) -> Contender:
        return Contender(name, partial(self.ours, **keys))


def _layered(layout: Layout, **keys: Any) -> Layered:
    return Layered(layout, zero_stage=3, resident_chunks=2, **keys)


def _script(layout: Layout, **keys: Any) -> Script:
    return Script(layout, stage=3, accumulation=MICRO_BATCHES, block={"pipeline_ranks": 1, **keys})


MODELS = (
    Model("GPT", _layered, GptSharded, reference_losses),
    Model("Llama", _script, LlamaSharded, reference),
)


def run(
    size: ModelSize = SIZE,
    models: Sequence[Model] = MODELS,
    compiler_budgets: Sequence[float] = COMPILED_BUDGETS,
    repetitions: int = REPETITIONS,
    part: str | None = None,
) -> Record:
    """Measures every model, or the one that ``part`` names, and every budget of torch's compiler."""
    record = begin(NAME)
    layout = Layout(1, RANKS, size)
    for model in [each for each in models if part in (None, each.name)]:
        ours, budgets = own_contenders(model, layout)
        peers = [Contender(f"FSDP2, {kind}", partial(model.sharded, kind=kind)) for kind in EVERY]
        compiled = [
            Contender(f"FSDP2, compiled, budget {budget:g}", partial(model.sharded, budget=budget))
            for budget in compiler_budgets
        ]
        others = [model.own(ONE_BY_ONE, recompute="none", micro_batch_group=1), *peers]
        held = measured([*ours, *others], layout)
        for contender in compiled:
            held[contender.name] = compiled_memory(contender, peers[-1], held[peers[-1].name], layout)
        groups = {TOGETHER: [*ours, *others], **{contender.name: [ours[-1], contender] for contender in compiled}}
        found = compete(groups, layout, MICRO_BATCHES, repetitions, reference=model.reference)
        enter(record, model, layout, found, held)
        aim(record, model, found[TOGETHER], held)
        for name, budget in budgets.items():
            record.add(name, config_of(model, layout, TOGETHER), BUDGET, [budget], "bytes")
        over = max(held[name].peak / budget for name, budget in budgets.items())
        record.aim(f"{model.name}: largest peak / its budget", over, OVER)
    return record


def own_contenders(model: Model, layout: Layout) -> tuple[list[Contender], dict[str, float]]:
    """Returns ds_lgamp with less and less recomputation, and its budgets, which lie between the peaks of full and
    none."""
    full, none = model.own(FULL, recompute="full"), model.own(NONE, recompute="none")
    held = measured([full, none], layout)
    least, most = held[FULL].peak, held[NONE].peak
    within = {f"{OURS}, {share:.0%} of the way": least + share * (most - least) for share in SHARES}
    # Activations are what a step holds beyond what stays between steps.
    within[HALF] = (held[NONE].state + most) / 2
    budgets = dict(sorted(within.items(), key=lambda each: each[1]))
    between = [model.own(name, recompute="auto", recompute_memory=in_gb(each)) for name, each in budgets.items()]
    return [full, *between, none], budgets


def in_gb(peak: float) -> str:
    """Returns bytes as the configuration key takes them."""
    return f"{peak / 1e9:.6f} GB"


def compiled_memory(compiled: Contender, plain: Contender, counted: Held, layout: Layout) -> Held:
    """Returns the memory of a contender that is compiled: what was counted of one that is not, and what the profiler
    sees more of the former."""
    more, less = (measured([each], layout, compiled=True)[each.name].peak for each in (compiled, plain))
    return Held(counted.state, counted.peak + more - less)


def measured(contenders: Sequence[Contender], layout: Layout, compiled: bool = False) -> dict[str, Held]:
    """Returns the memory of a step, by contender: that of the rank with the largest peak."""
    arguments = contenders, layout, compiled
    on_ranks = run_on_ranks(layout.data_ranks, _measured_on_rank, *arguments, seconds=SECONDS)
    return {each.name: max((held[each.name] for held in on_ranks), key=lambda held: held.peak) for each in contenders}


def _measured_on_rank(contenders: Sequence[Contender], layout: Layout, compiled: bool) -> dict[str, Held]:
    prepare_rank()
    found = {}
    for contender in contenders:
        gc.collect()
        others = {storage._cdata: storage for storage in map(storage_of, live_tensors())}
        training = contender.build(layout)
        for step in range(WARM_UP):
            training.step(step, MICRO_BATCHES)
        gc.collect()
        own = [tensor for tensor in live_tensors() if storage_of(tensor)._cdata not in others]
        measure = _allocated if compiled else _counted
        found[contender.name] = measure(own, partial(training.step, WARM_UP, MICRO_BATCHES))
    return found


def _counted(own: list[torch.Tensor], step: Callable[[], Any]) -> Held:
    with PeakMemory(own) as memory:
        state = memory.live()
        step()
    return Held(state, memory.peak)


def _allocated(own: list[torch.Tensor], step: Callable[[], Any]) -> Held:
    state = PeakMemory(own).live()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    beyond = accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns()))
    return Held(state, state + max(beyond))


def config_of(model: Model, layout: Layout, group: str) -> Config:
    return {**layout.config(MICRO_BATCHES), PART: model.name, "group": group}


def enter(record: Record, model: Model, layout: Layout, found: dict[str, dict[str, list[Duration]]], held: Any) -> None:
    """Enters step, CPU seconds and peak of every contender. Compiled ones have ds_lgamp's beside them."""
    for group, durations in found.items():
        config = config_of(model, layout, group)
        for name, each in durations.items():
            record.add(name, config, STEP, [duration.wall for duration in each], "s")
            record.add(name, config, CPU, [duration.cpu for duration in each], "s")
            record.add(name, config, PEAK, [held[name].peak], "bytes")


def aim(record: Record, model: Model, durations: dict[str, list[Duration]], held: dict[str, Held]) -> None:
    """Enters the targets of ds_lgamp: more memory never makes a step longer, half of the activations of none save half
    of recomputation's cost, and no peer is faster in as much memory or less."""
    walls = {name: [duration.wall for duration in each] for name, each in durations.items()}
    steps = {name: median(each) for name, each in walls.items()}
    own = [name for name in walls if name.startswith(OURS)]
    ordered = [name for name in own if name != ONE_BY_ONE]
    # Contenders take turns, so the steps of a round have the same load.
    longer = max((list(map(truediv, walls[more], walls[less])) for less, more in pairwise(ordered)), key=median)
    record.aim(f"{model.name}: largest step / step with less memory", median(longer), LIMIT, samples=longer)
    left = (steps[HALF] - steps[NONE]) / (steps[FULL] - steps[NONE])
    record.aim(f"{model.name}: share of recomputation's cost at half of none's activations", left, 0.5)
    for name in walls:
        fitting = [steps[each] for each in own if held[each].peak <= held[name].peak]
        if name not in own and fitting:
            record.aim(f"{model.name}: step / that of {name}, in no more memory", min(fitting) / steps[name], 1.0)
