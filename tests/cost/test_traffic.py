"""The communication of a step is what its program predicts, and happens when the program says."""

import math
from itertools import product

import pytest
import torch

from ds_lgamp.cost.traffic import collective_bytes, predict_traffic
from ds_lgamp.cost.units import ElementBytes, Sharding, UnitSize, aligned
from ds_lgamp.runtime.batch import BatchState
from ds_lgamp.runtime.measure import CollectiveCounter
from ds_lgamp.schedule.actions import SENDS
from ds_lgamp.schedule.placement import place_chunks, split_balanced
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import ProgramSpec
from testing.ranks import run_on_ranks
from tests.runtime.assembly import assemble, build_grid
from tests.runtime.models import build_model, micro_batch
from tests.slow import slow_except


def train(grid, spec, tied, steps=2, log=None, communication_dtype=None):
    """Returns the calls of the last step, the assembly and this rank's program. ``log`` then has the actions of that
    step, each at its beginning."""
    model = build_model(8, tied)
    bounds = split_balanced([1] * len(model.layers), spec.chunks)
    assembled = assemble(grid, spec, model, bounds, lambda: optimizer.step(), communication_dtype=communication_dtype)
    assembled.partition.release_all()
    optimizer = torch.optim.SGD([segment.shard for segment in assembled.partition.segments()], lr=0.01)
    actions = build_program(spec)[grid.pipeline_rank]
    for step in range(steps):
        log = [] if log is None else log
        log.clear()
        batch = BatchState(spec.micro_batches, lambda index, step=step: micro_batch(step, index))
        with CollectiveCounter() as counter, assembled.executor.run_batch(batch):
            for action in actions:
                log.append(str(action))
                assembled.executor.execute(action)
    return counter, assembled, actions, bounds


def messages(actions):
    """How many messages a rank sends. Several tensors, such as an activation and its mask, travel as one message."""
    return sum(action.kind in SENDS for action in actions)


def count_all(pipeline_ranks, data_ranks, numbers):
    grid = build_grid(pipeline_ranks, data_ranks)
    for stage in range(4):
        for tied in (True, False):
            for micro_batches in numbers:
                chunks = 3 * pipeline_ranks + 1
                placement = place_chunks("modular", chunks, pipeline_ranks)
                group = max(1, micro_batches // 2) if stage % 2 else micro_batches
                spec = ProgramSpec(placement, "layered", micro_batches, group, stage)
                check_counts(grid, spec, tied)
    return True


def check_counts(grid, spec, tied):
    counter, assembled, actions, bounds = train(grid, spec, tied)
    label = (spec, tied, dict(counter.calls))
    assert counter.calls["send"] == messages(actions), label
    collectives = {kind: count for kind, count in counter.calls.items() if kind not in ("send", "receive")}
    tie_sums = sum(unit.tie_group is not None for unit in assembled.partition.units)
    if grid.data_ranks == 1:
        assert collectives == ({"all_gather": tie_sums} if tie_sums else {}), label
        return
    predicted = predict_traffic(actions, spec.zero_stage, assembled.own_chunks, assembled.tied_users)
    reduction = "all_reduce" if spec.zero_stage == 0 else "all_to_all"
    expected = {
        "all_gather": predicted.gathers + predicted.tied_gathers + tie_sums,
        reduction: predicted.reduces + predicted.tied_reduces,
    }
    assert collectives == {kind: count for kind, count in expected.items() if count}, label


QUICK = (1, 2, (1, 4))
LAYOUTS = slow_except([QUICK], [QUICK, (1, 2, (16,)), (2, 1, (1, 4, 16)), (2, 2, (1, 4, 16))], several=True)


@pytest.mark.parametrize(("pipeline_ranks", "data_ranks", "micro_batches"), LAYOUTS)
def test_collectives_are_those_the_program_predicts(pipeline_ranks, data_ranks, micro_batches):
    assert all(run_on_ranks(pipeline_ranks * data_ranks, count_all, pipeline_ranks, data_ranks, micro_batches))


def bytes_of_a_step():
    grid = build_grid(1, 2)
    spec = ProgramSpec((0, 0, 0, 0), "layered", 4, 4, zero_stage=3, resident_chunks=2)
    counter, assembled, _, _ = train(grid, spec, tied=False)
    shard_bytes = [unit.storage.shard.numel() * 4 for unit in assembled.partition.units]
    return dict(counter.bytes_sent), shard_bytes


def test_bytes_are_a_shard_per_gather_and_reduce():
    """Two ranks, four chunks, two resident. Chunks 0 and 1 are gathered twice and each chunk is reduced once. gloo's
    own reduce-scatter would send twice as much."""
    sent, shards = run_on_ranks(2, bytes_of_a_step)[0]
    assert sent["all_gather"] == sum(shards) + shards[0] + shards[1]
    assert sent["all_to_all"] == sum(shards)


def bytes_by_communication_type():
    """Returns the sent and the predicted bytes by stage and type."""
    grid, told = build_grid(1, 2), {}
    for stage, dtype in product(range(4), (None, torch.float16, torch.bfloat16)):
        spec = ProgramSpec((0, 0, 0, 0), "layered", 4, 2, stage)
        counter, assembled, actions, _ = train(grid, spec, tied=False, communication_dtype=dtype)
        size = ElementBytes(communication=None if dtype is None else dtype.itemsize)
        predicted = 0
        for chunk, (unit,) in assembled.partition.chunk_units.items():
            parameters = sum(aligned(math.prod(shape)) for _, shape, _ in unit.storage.contents())
            unit_size = UnitSize(parameters, parameters, (chunk,))
            predicted += collective_bytes(actions, unit_size, Sharding(stage, 2), size)
        told[stage, dtype] = counter.bytes_sent, predicted
    return told


def test_gradients_send_the_bytes_of_the_type_they_travel_in():
    for told in run_on_ranks(2, bytes_by_communication_type):
        for (stage, dtype), (sent, predicted) in told.items():
            assert sent.total() == predicted, (stage, dtype)
            reduction = "all_to_all" if stage else "all_reduce"
            wide = told[stage, None][0]
            assert sent["all_gather"] == wide["all_gather"]
            assert sent[reduction] == wide[reduction] // (1 if dtype is None else 2)


def trace_of_a_step(resident_chunks, zero_stage=3):
    log = []
    grid = build_grid(1, 2)
    spec = ProgramSpec((0, 0, 0, 0), "layered", 2, 2, zero_stage, resident_chunks, defers_gathers=True)
    train(grid, spec, tied=False, log=log)
    return log


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_gathers_run_ahead_and_reductions_are_awaited_late(zero_stage):
    trace = run_on_ranks(2, trace_of_a_step, 2, zero_stage)[0]
    position = {event: trace.index(event) for event in trace}
    for chunk in range(3):
        assert position[f"GATHER{chunk + 1}"] < position[f"F{chunk}.0"]
        assert position[f"WAIT_GATHER{chunk + 1}"] > position[f"F{chunk}.1"]
    # There are two gradient buffers. Chunk 1 needs the buffer of chunk 3 and awaits its reduction. The last two end
    # with the step.
    assert position["B2.1"] < position["WAIT_REDUCE3"] == position["B1.0"] - 1
    assert position["B1.1"] < position["WAIT_REDUCE2"] == position["B0.0"] - 1
    assert [*trace][-3:] == ["WAIT_REDUCE1", "WAIT_REDUCE0", "STEP"]


def test_reductions_with_buffers_to_spare_are_awaited_at_the_step():
    trace = run_on_ranks(2, trace_of_a_step, 4)[0]
    assert trace[-5:] == [*(f"WAIT_REDUCE{chunk}" for chunk in reversed(range(4))), "STEP"]
