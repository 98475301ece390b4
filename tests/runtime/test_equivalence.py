"""Every layout trains like one process without parallelism."""

from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.runtime.batch import BatchState
from ds_lgamp.schedule.placement import place_chunks, split_balanced
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.validate import validate
from testing.ranks import run_on_ranks
from tests.pairwise import pairwise
from tests.runtime.assembly import assemble, build_grid, gathered
from tests.runtime.models import LEARNING_RATE, build_model, micro_batch, train_reference
from tests.slow import slow_except

STEPS = 2
LAYOUTS = [(pipeline_ranks, data_ranks) for pipeline_ranks in (1, 2, 4) for data_ranks in (1, 2)]


class Order(NamedTuple):
    schedule: str
    chunks_per_rank: int
    one_more: bool = False
    """Whether C mod P is not 0."""
    group: int = 4
    placement: str = "modular"


FACTORS = {
    "order": [
        *(Order("layered", 2, *rest) for rest in product((False, True), (4, 3))),
        Order("layered", 2, True, placement="contiguous"),
        Order("interleaved_1f1b", 2),
        Order("1f1b", 1),
        Order("gpipe", 1),
        Order("zbv", 2, placement="vee"),
    ],
    "stage": [0, 1, 2, 3],
    "tied": [True, False],
    "recompute": ["from the device", "from the host", "no"],
}


def full_product():
    return [dict(zip(FACTORS, values)) for values in product(*FACTORS.values())]


def spec(order, stage, pipeline_ranks, recompute="from the device"):
    chunks = order.chunks_per_rank * pipeline_ranks + order.one_more
    placed = place_chunks(order.placement, chunks, pipeline_ranks)
    arguments = placed, order.schedule, 4, order.group, stage
    return ProgramSpec(
        *arguments,
        resident_chunks=1 + stage % 2,
        stores_inputs=recompute == "from the host",
        recomputes=recompute != "no",
    )


def relative(difference: torch.Tensor, reference: torch.Tensor) -> float:
    return (difference.norm() / reference.norm().clamp(min=1e-12)).item()


def train_all(cases, pipeline_ranks, data_ranks):
    grid = build_grid(pipeline_ranks, data_ranks)
    references = {tied: train_reference(build_model(8, tied), STEPS, 4 * data_ranks) for tied in (True, False)}
    for case in cases:
        configuration = spec(case["order"], case["stage"], pipeline_ranks, case["recompute"])
        compare(grid, configuration, case["tied"], references[case["tied"]])
    return len(cases)


def compare(grid, configuration, tied, reference, tolerance=2e-6):
    model = build_model(8, tied)
    bounds = split_balanced([1] * len(model.layers), configuration.chunks)
    gradients = []

    def apply_step():
        gradients.append(gathered(assembled.partition, lambda unit: unit.reduction.shard_gradient))
        optimizer.step()

    assembled = assemble(grid, configuration, model, bounds, apply_step)
    assembled.partition.release_all()
    optimizer = torch.optim.SGD([segment.shard for segment in assembled.partition.segments()], lr=LEARNING_RATE)
    program = build_program(configuration)
    validate(configuration, program)
    for step in range(STEPS):
        batch = BatchState(4, lambda index, step=step: micro_batch(step, 4 * grid.data_rank + index))
        with assembled.executor.run_batch(batch):
            assembled.executor.run(program[grid.pipeline_rank])
        check_loss(grid, configuration, assembled, reference.losses[step])
        parameters = gathered(assembled.partition, lambda unit: unit.storage.shard)
        for name, parameter in parameters.items():
            label = (configuration, tied, step, name)
            expected = reference.gradients[step][name]
            assert relative(gradients[-1][name] - expected, expected) < tolerance, label
            expected = reference.parameters[step][name]
            assert relative(parameter - expected, expected) < tolerance, label


def check_loss(grid, configuration, assembled, expected):
    if grid.pipeline_rank == configuration.loss_rank:
        loss = torch.stack(assembled.executor.losses).mean()
        dist.all_reduce(loss, group=grid.data_group)
        assert loss.item() / grid.data_ranks == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("pipeline_ranks", "data_ranks"), slow_except([(2, 2)], LAYOUTS, several=True))
def test_every_pair_of_factors_trains_as_one_process(pipeline_ranks, data_ranks):
    check_all(pairwise(full_product()), pipeline_ranks, data_ranks)


def test_a_vee_trains_as_one_process():
    """Only from three ranks on does a rank exchange messages of one kind with two others."""
    check_all([case for case in pairwise(full_product()) if case["order"].schedule == "zbv"], 3, 1)


@pytest.mark.full
@pytest.mark.parametrize(("pipeline_ranks", "data_ranks"), LAYOUTS)
def test_the_full_product_of_factors_trains_as_one_process(pipeline_ranks, data_ranks):
    check_all(full_product(), pipeline_ranks, data_ranks)


def check_all(cases, pipeline_ranks, data_ranks):
    ranks = pipeline_ranks * data_ranks
    assert run_on_ranks(ranks, train_all, cases, pipeline_ranks, data_ranks) == [len(cases)] * ranks
