"""Under NCCL's rules every layout trains as on gloo, to the bit, whenever messages travel."""

import ast
import inspect
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.optimizers.norms import exact_norm, global_norm
from ds_lgamp.partition import collectives, flat_storage, shards
from ds_lgamp.partition.agreement import everyone, host_group
from ds_lgamp.runtime import links
from ds_lgamp.runtime.batch import BatchState
from ds_lgamp.runtime.edges import posts_on_arrival
from ds_lgamp.runtime.messages import HEADER_ELEMENTS
from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.placement import place_chunks, split_balanced
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import Hierarchy, ProgramSpec
from testing import simnccl
from testing.ranks import run_on_ranks
from tests.runtime.assembly import DEVICE, Grid, assemble, build_grid
from tests.runtime.models import LEARNING_RATE, build_model, micro_batch
from tests.schedule.strategies import pieces_of
from tests.slow import slow_except

STEPS = 2


class Layout(NamedTuple):
    spec: ProgramSpec
    data_ranks: int
    tied: bool
    recompute: bool
    in_rank_order: bool
    dynamic: bool
    """Whether every message has a header."""
    delivery: simnccl.Delivery


def layouts(ranks: int, count: int, seed: int = 0) -> list[Layout]:
    draws = random.Random(f"{ranks} {seed}")
    return [random_layout(draws, ranks) for _ in range(count)]


def random_layout(draws: random.Random, ranks: int) -> Layout:
    pipeline_ranks = draws.choice([count for count in range(1, ranks + 1) if ranks % count == 0])
    data_ranks = ranks // pipeline_ranks
    return Layout(
        random_spec(draws, pipeline_ranks, data_ranks),
        data_ranks,
        tied=draws.random() < 0.5,
        recompute=draws.random() < 0.5,
        in_rank_order=draws.random() < 0.3,
        dynamic=draws.random() < 0.3,
        delivery=simnccl.Delivery(draws.choice(["early", "late", "random", "random"]), draws.randrange(1000)),
    )


def random_spec(draws: random.Random, pipeline_ranks: int, data_ranks: int) -> ProgramSpec:
    schedule = draws.choice(["layered", "layered", "interleaved_1f1b", "1f1b", "gpipe", "zbv"])
    micro_batches, placement, chunks = draws.randint(1, 6), "modular", pipeline_ranks
    if schedule == "layered":
        placement = draws.choice(["modular", "contiguous"])
        chunks = draws.randint(pipeline_ranks, min(12, 4 * pipeline_ranks))
    elif schedule == "interleaved_1f1b":
        chunks *= draws.randint(1, min(3, 12 // pipeline_ranks))
        micro_batches = pipeline_ranks * draws.randint(1, 2)
    elif schedule == "zbv":
        placement, chunks = "vee", 2 * pipeline_ranks
    returns_outputs = draws.random() < 0.25
    if returns_outputs:
        micro_batches = pipeline_ranks * draws.randint(1, 2)
    zero_stage = draws.randrange(4)
    # Nodes of one rank are no special case for programs and partition, and two ranks form no others.
    node_ranks = draws.choice([count for count in range(1, max(data_ranks, 2)) if data_ranks % count == 0])
    return ProgramSpec(
        place_chunks(placement, chunks, pipeline_ranks),
        schedule,
        micro_batches,
        draws.randint(1, micro_batches) if schedule == "layered" else micro_batches,
        zero_stage=zero_stage,
        resident_chunks=draws.randint(1, 3),
        defers_gathers=draws.random() < 0.5,
        hierarchy=draws.choice([None, Hierarchy(node_ranks, False), Hierarchy(node_ranks, True)])
        if zero_stage == 3 and data_ranks > 1
        else None,
        returns_outputs=returns_outputs,
    )


class Outcome(NamedTuple):
    """What one rank got."""

    losses: list[torch.Tensor]
    """Of every micro-batch, those of an evaluation last."""
    norms: list[torch.Tensor]
    gradients: list[torch.Tensor]
    """The shard of every unit in every step."""
    parameters: list[torch.Tensor]
    """The shard of every segment after every step."""

    def same_as(self, other: "Outcome") -> bool:
        """Whether every bit is the same, and no number is NaN."""
        return all(
            len(own) == len(others) and all(map(torch.equal, own, others))
            for own, others in zip(self, other, strict=True)
        )


def train_all(chosen: list[Layout]) -> list[Outcome]:
    """Trains the layouts one after another, and shares the groups of those with the same grid."""
    grids: dict[tuple[int, int, bool], Grid] = {}
    outcomes = []
    for layout in chosen:
        key = layout.spec.pipeline_ranks, layout.data_ranks, layout.dynamic
        if key not in grids:
            grids[key] = with_lasting_links(build_grid(*key))
        simnccl.deliver(*layout.delivery)
        try:
            outcomes.append(train(grids[key], layout))
            if dist.get_backend() == simnccl.NAME:
                simnccl.synchronize()
        except Exception as error:
            raise AssertionError(f"{layout} failed") from error
    return outcomes


def with_lasting_links(grid: Grid) -> Grid:
    """Makes assemblies on ``grid`` share their links, because every one has threads of its own."""
    ranks = range(grid.pipeline_ranks)
    lasting = grid.links((*ranks, *ranks, *reversed(ranks)))

    def as_new(placement):
        lasting.reset()
        return lasting

    return grid._replace(links=as_new)


def train(grid: Grid, layout: Layout) -> Outcome:
    spec = replace(layout.spec, receives_on_arrival=posts_on_arrival(), recomputes=layout.recompute)
    model = build_model(8, layout.tied)
    outcome = Outcome([], [], [], [])

    def apply_step() -> None:
        outcome.gradients.extend(unit.reduction.shard_gradient.clone() for unit in partition.units if unit.trains)
        counted = partition.counted_gradients()
        outcome.norms.extend(norm(counted, dist.group.WORLD, DEVICE) for norm in (global_norm, exact_norm))
        optimizer.step()
        outcome.parameters.extend(segment.shard.detach().clone() for segment in partition.segments())

    executor, partition, *_ = assemble(
        grid,
        spec,
        model,
        split_balanced([1] * len(model.layers), spec.chunks),
        apply_step,
        in_rank_order=layout.in_rank_order,
    )
    partition.release_all()
    # In a group, because the layers of a rank may have no parameters.
    optimizer = torch.optim.SGD([{"params": [segment.shard for segment in partition.segments()]}], lr=LEARNING_RATE)
    for step in range(STEPS):
        outcome.losses.extend(run_batch(grid, executor, spec, step))
    outcome.losses.extend(run_batch(grid, executor, spec.evaluation(), STEPS))
    return outcome


def run_batch(grid, executor, spec, step):
    batch = BatchState(
        spec.micro_batches,
        lambda index: micro_batch(step, spec.micro_batches * grid.data_rank + index),
        training=not spec.forward_only,
        program=build_program(spec)[grid.pipeline_rank],
        returns_outputs=spec.returns_outputs,
    )
    for piece in pieces_of(batch.program):
        with executor.run_batch(batch):
            executor.run(piece)
        if piece[-1].kind is Kind.RETURN:
            # Here hosts meet, because the outputs travel from one to the others.
            everyone(None, host_group())
            gradient = torch.tensor(1 / spec.micro_batches)
            batch.output_gradients.update({number: [gradient] for number in range(len(batch.losses))})
    return [loss.clone() for loss in executor.losses]


def compare(ranks: int, chosen: list[Layout], seconds: float = 300) -> None:
    on_gloo = run_on_ranks(ranks, train_all, chosen, seconds=seconds)
    simulated = run_on_ranks(ranks, train_all, chosen, backend=simnccl.NAME, seconds=seconds)
    for number, layout in enumerate(chosen):
        for rank in range(ranks):
            assert simulated[rank][number].same_as(on_gloo[rank][number]), (rank, layout)


WAITING = (collectives, flat_storage, shards, links)
"""The modules that wait for communication."""
COVERING = [
    Layout(
        ProgramSpec((0, 0), "layered", 2, 2, stage),
        data_ranks=2,
        tied=False,
        recompute=True,
        in_rank_order=in_rank_order,
        dynamic=False,
        delivery=simnccl.Delivery("late"),
    )
    for stage, in_rank_order in ((0, False), (0, True), (3, False))
]
COVERING += [
    COVERING[-1]._replace(spec=ProgramSpec((0, 0), "layered", 2, 2, 3, hierarchy=Hierarchy(1, replicated)))
    for replicated in (False, True)
]
COVERING.append(COVERING[0]._replace(spec=ProgramSpec((0, 1), "1f1b", 2, 2, 0), data_ranks=1, tied=True))
"""Layouts of two ranks that come by every wait, each work as late as it may be."""


ELSEWHERE = ("_wait(sent, self.headers.peer)", "update.wait()", "self._read_ahead.wait()")
"""Waits that are not tested here: for sent headers, which hosts exchange on gloo; for an update of a
shard, which tests/partition/test_host.py is about; and for a gather that a reader has awaited on a
stream of its own, which tests/partition/test_unit.py is about."""


class Wait(NamedTuple):
    """One place in the source that waits for communication."""

    module: str
    line: int
    text: str


def waits() -> list[Wait]:
    return [
        Wait(module.__name__, node.lineno, ast.unparse(node))
        for module in WAITING
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call) and awaited(node) is not None and ast.unparse(node) not in ELSEWHERE
    ]


def awaited(call: ast.Call) -> ast.expr | None:
    """Returns what a call waits for; None if it is no wait."""
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("wait", "done"):
        return call.func.value
    return call.args[0] if isinstance(call.func, ast.Name) and call.func.id == "_wait" else None


class Without(ast.NodeTransformer):
    """Replaces one wait by what it waits for."""

    def __init__(self, wait: Wait) -> None:
        self.wait = wait

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        what = awaited(node)
        return what if what is not None and node.lineno == self.wait.line else node


def remove(wait: Wait, rank: int) -> None:
    """Gives the functions of the module the code that they would have without the wait."""
    if "headers" in wait.text:
        send_headers_late()
    module = sys.modules[wait.module]
    changed = Without(wait).visit(ast.parse(inspect.getsource(module)))
    mutant: dict = {"__name__": wait.module}
    exec(compile(changed, module.__file__, "exec"), mutant)
    replace_code(vars(module), mutant)


def send_headers_late() -> None:
    """Hosts exchange headers on gloo. A header has often arrived when it is read, even where nobody waited for it."""
    send = links._send

    def send_late(message, endpoint):
        if message.dtype is torch.int64 and message.numel() == HEADER_ELEMENTS:
            time.sleep(0.3)
        return send(message, endpoint)

    links._send = send_late


def replace_code(names, mutants) -> None:
    for name, value in list(names.items()):
        mutant = mutants.get(name)
        if isinstance(value, FunctionType) and isinstance(mutant, FunctionType):
            value.__code__ = mutant.__code__
        elif isinstance(value, type) and isinstance(mutant, type) and value is not mutant:
            replace_code(vars(value), vars(mutant))


@pytest.mark.parametrize(("ranks", "count"), slow_except([(3, 6)], [(2, 12), (3, 6), (4, 12)], several=True))
def test_every_layout_trains_as_on_gloo(ranks, count):
    compare(ranks, layouts(ranks, count))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "count"), [(2, 15), (3, 10), (4, 10), (6, 3)])
def test_dozens_of_layouts_train_as_on_gloo(ranks, count):
    compare(ranks, layouts(ranks, count, seed=2), seconds=1800)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "count"), [(2, 100), (3, 60), (4, 80), (6, 15)])
def test_hundreds_of_layouts_train_as_on_gloo(ranks, count):
    compare(ranks, layouts(ranks, count, seed=1), seconds=1800)


@pytest.fixture(scope="module")
def on_gloo():
    return run_on_ranks(2, train_all, COVERING)


def is_as_on_gloo(on_gloo: list[list[Outcome]], prepare: Callable[[int], None] | None = None) -> bool:
    """Whether the covering layouts train as on gloo. ``prepare`` is called on every rank first."""
    try:
        simulated = run_on_ranks(2, train_all, COVERING, before_init=prepare, backend=simnccl.NAME, seconds=60)
    except AssertionError:
        return False
    return all(own.same_as(other) for rank in range(2) for own, other in zip(simulated[rank], on_gloo[rank]))


def test_with_all_waits_nothing_fails(on_gloo):
    assert is_as_on_gloo(on_gloo)


@pytest.mark.parametrize("wait", waits(), ids=lambda wait: f"{wait.module}:{wait.line} {wait.text}")
def test_no_wait_is_dispensable(on_gloo, wait):
    assert not is_as_on_gloo(on_gloo, partial(remove, wait))
