"""Hierarchical shards train like one process. Between nodes, each chunk travels once per step and once per group."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from ds_lgamp.cost.traffic import bytes_between_nodes, collective_bytes, predict_traffic
from ds_lgamp.cost.units import ElementBytes, Sharding, UnitSize
from ds_lgamp.runtime.batch import BatchState
from ds_lgamp.runtime.measure import CollectiveCounter
from ds_lgamp.schedule.placement import place_chunks, split_balanced
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import Hierarchy, ProgramSpec
from testing.ranks import run_on_ranks
from tests.runtime.assembly import assemble, build_grid
from tests.runtime.models import LEARNING_RATE, build_model, micro_batch, train_reference
from tests.runtime.test_equivalence import STEPS, compare

SHAPES = [(4, 2, False), (3, 1, True), (2, 3, False), (4, 9, True)]
"""Micro-batches of a group, resident chunks, and whether refreshes are deferred."""


def node_sizes(data_ranks):
    """Returns how many ranks a node may have. Of two ranks, each is a node of its own."""
    return [ranks for ranks in range(1 if data_ranks == 2 else 2, data_ranks) if data_ranks % ranks == 0]


def specs(pipeline_ranks, data_ranks):
    placement = place_chunks("modular", 2 * pipeline_ranks + 1, pipeline_ranks)
    for ranks, replicated, shape in product(node_sizes(data_ranks), (False, True), SHAPES):
        group, resident, defers = shape
        hierarchy = Hierarchy(ranks, replicated)
        yield ProgramSpec(placement, "layered", 4, group, 3, resident, defers_gathers=defers, hierarchy=hierarchy)


def train_all(pipeline_ranks, data_ranks, stride):
    grid = build_grid(pipeline_ranks, data_ranks)
    references = {tied: train_reference(build_model(8, tied), STEPS, 4 * data_ranks) for tied in (True, False)}
    cases = [*product(specs(pipeline_ranks, data_ranks), (True, False))]
    for number, (spec, tied) in enumerate(cases[::stride]):
        # Sums of six ranks round more, with hierarchical shards and without.
        compare(
            grid,
            replace(spec, recomputes=bool(number % 2)),
            tied,
            references[tied],
            tolerance=1e-6 * max(2, data_ranks),
        )
        check_traffic(grid, spec, tied)


def check_traffic(grid, spec, tied):
    """Compares number and bytes of the collectives of a step, by group, with the formulas."""
    calls, partition, actions, assembled = one_step(grid, spec, tied)
    nodes, hierarchy = grid.nodes(spec.hierarchy), spec.hierarchy
    counts = predict_traffic(actions, 3, assembled.own_chunks, assembled.tied_users)
    near = {
        "all_gather": counts.gathers + counts.tied_gathers,
        "all_to_all": counts.reduces + counts.tied_reduces,
    }
    combination = "all_reduce" if hierarchy.replicated else "all_to_all"
    far = {"all_gather": counts.refreshes, combination: counts.combines}
    label = (spec, tied)
    for group, expected in ((nodes.inside, near), (nodes.peers, far)):
        found = [kind for kind, _ in calls[group]]
        expected = expected if group.size() > 1 else {}
        assert {kind: found.count(kind) for kind in found} == {kind: n for kind, n in expected.items() if n}, label
    units = [size_of(unit, partition) for unit in partition.units]
    size, sharding = ElementBytes(), Sharding(3, grid.data_ranks, hierarchy)
    between = sum(bytes_between_nodes(actions, unit, sharding, size) for unit in units)
    assert sum(amount for _, amount in calls[nodes.peers]) == between, label
    everything = sum(collective_bytes(actions, unit, sharding, size) for unit in units)
    tie_sums = sum(amount for _, amount in calls["ties"])
    assert sum(amount for _, amount in calls[nodes.inside]) + tie_sums == everything - between, label
    assert between == once_per_step(partition, grid.data_ranks, hierarchy, counts.combines), label


def once_per_step(partition, data_ranks, hierarchy, combines):
    """Returns two volumes per element that a rank keeps, (R - 1)/R times, and one more for each further group."""
    nodes = hierarchy.nodes(data_ranks)
    volumes = combines // len(partition.units) * (2 if hierarchy.replicated else 1) + (not hierarchy.replicated)
    return sum(volumes * 4 * unit.storage.kept.numel() * (nodes - 1) // nodes for unit in partition.units)


def size_of(unit, partition):
    users = tuple(chunk for chunk, members in partition.chunk_units.items() if unit in members)
    copies = unit.tie_group.size() if unit.tie_group is not None else 1
    return UnitSize(unit.storage.end, unit.storage.end, users, unit.tied, copies)


def one_step(grid, spec, tied):
    """Returns the calls of the second step by group, and what made them."""
    model = build_model(8, tied)
    bounds = split_balanced([1] * len(model.layers), spec.chunks)
    assembled = assemble(grid, spec, model, bounds, lambda: optimizer.step())
    partition = assembled.partition
    partition.release_all()
    optimizer = torch.optim.SGD([segment.shard for segment in partition.segments()], lr=LEARNING_RATE)
    actions = build_program(spec)[grid.pipeline_rank]
    for step in range(2):
        batch = BatchState(4, lambda index, step=step: micro_batch(step, index))
        with CollectiveCounter() as counter, assembled.executor.run_batch(batch):
            assembled.executor.run(actions)
    nodes = grid.nodes(spec.hierarchy)
    calls = {group: counter.calls_in(group) for group in (nodes.inside, nodes.peers)}
    calls["ties"] = [
        call for unit in partition.units if unit.tie_group is not None for call in counter.calls_in(unit.tie_group)
    ]
    return calls, partition, actions, assembled


def test_training_equals_one_process_and_sends_what_the_formulas_say():
    run_on_ranks(4, train_all, 1, 4, 5)


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline_ranks", "data_ranks"), [(1, 4), (1, 2), (2, 2), (1, 6), (2, 4)])
def test_training_at_every_layout_equals_one_process_and_sends_what_the_formulas_say(pipeline_ranks, data_ranks):
    run_on_ranks(pipeline_ranks * data_ranks, train_all, pipeline_ranks, data_ranks, 1)
