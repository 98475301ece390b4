"""Every layout trains like one process without parallelism."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.runtime.batch import BatchState
from ds_lgamp.schedule.placement import place_chunks, split_balanced
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.validate import validate
from testing.ranks import run_on_ranks
from tests.runtime.assembly import assemble, build_grid, gathered
from tests.runtime.models import LEARNING_RATE, build_model, micro_batch, train_reference
from tests.slow import slow_except

STEPS = 3
LAYOUTS = [(pipeline_ranks, data_ranks) for pipeline_ranks in (1, 2, 4) for data_ranks in (1, 2)]


def configurations(pipeline_ranks):
    """Stages x orders x {tied, untied} x {C mod P = 0 or not}, where an order allows it."""
    chunk_counts = [2 * pipeline_ranks, 2 * pipeline_ranks + 1]
    for stage, tied in product(range(4), (True, False)):
        for chunks, group in product(chunk_counts, (4, 3)):
            yield spec("layered", pipeline_ranks, chunks, stage, group), tied
        yield spec("layered", pipeline_ranks, chunk_counts[1], stage, placement="contiguous"), tied
        yield spec("interleaved_1f1b", pipeline_ranks, chunk_counts[0], stage), tied
        for schedule in ("1f1b", "gpipe"):
            yield spec(schedule, pipeline_ranks, pipeline_ranks, stage), tied


def spec(schedule, pipeline_ranks, chunks, stage, group=4, placement="modular"):
    placed = place_chunks(placement, chunks, pipeline_ranks)
    return ProgramSpec(placed, schedule, 4, group, stage, resident_chunks=1 + stage % 2)


def relative(difference: torch.Tensor, reference: torch.Tensor) -> float:
    return (difference.norm() / reference.norm().clamp(min=1e-12)).item()


def train_all(pipeline_ranks, data_ranks):
    grid = build_grid(pipeline_ranks, data_ranks)
    references = {tied: train_reference(build_model(8, tied), STEPS, 4 * data_ranks) for tied in (True, False)}
    count = 0
    for (configuration, tied), recompute in product(configurations(pipeline_ranks), (True, False)):
        compare(grid, configuration, tied, recompute, references[tied])
        count += 1
    return count


def compare(grid, configuration, tied, recompute, reference):
    model = build_model(8, tied)
    bounds = split_balanced([1] * len(model.layers), configuration.chunks)
    gradients = []

    def apply_step():
        gradients.append(gathered(assembled.partition, lambda unit: unit.reduction.shard_gradient))
        optimizer.step()

    assembled = assemble(grid, configuration, model, bounds, apply_step, recompute)
    assembled.partition.release_all()
    optimizer = torch.optim.SGD([segment.shard for segment in assembled.partition.segments()], lr=LEARNING_RATE)
    program = build_program(configuration)
    validate(configuration, program)
    for step in range(STEPS):
        batch = BatchState(
            4,
            lambda index, step=step: micro_batch(step, 4 * grid.data_rank + index),
            turns_at_once=configuration.turns_at_once,
        )
        with assembled.executor.run_batch(batch):
            assembled.executor.run(program[grid.pipeline_rank])
        check_loss(grid, configuration, assembled, reference.losses[step])
        parameters = gathered(assembled.partition, lambda unit: unit.storage.shard)
        for name, parameter in parameters.items():
            label = (configuration, tied, recompute, step, name)
            expected = reference.gradients[step][name]
            assert relative(gradients[-1][name] - expected, expected) < 2e-6, label
            expected = reference.parameters[step][name]
            assert relative(parameter - expected, expected) < 2e-6, label


def check_loss(grid, configuration, assembled, expected):
    if grid.pipeline_rank == configuration.loss_rank:
        loss = torch.stack(assembled.executor.losses).mean()
        dist.all_reduce(loss, group=grid.data_group)
        assert loss.item() / grid.data_ranks == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("pipeline_ranks", "data_ranks"), slow_except([(2, 2)], LAYOUTS, several=True))
def test_training_equals_one_process(pipeline_ranks, data_ranks):
    counts = run_on_ranks(pipeline_ranks * data_ranks, train_all, pipeline_ranks, data_ranks)
    assert counts == [128] * pipeline_ranks * data_ranks
