"""DeepSpeed's keys for shards of a node: training, precision, access to tensors and optimizer state."""

import os

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.config import ConfigError
from ds_lgamp.partition.agreement import everyone
from ds_lgamp.runtime.node import NODE
from ds_lgamp.schedule.spec import Hierarchy
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.models import Training, train_reference
from tests.integrations.deepspeed.running import Layout, batches, initialize, json_config, train
from tests.runtime.test_equivalence import relative

HPZ, MICS = {"zero_hpz_partition_size": 2}, {"mics_shard_size": 2}
TRAINING = Training(blocks=4, tied=True, momentum=0.9, decay=0.01, clipping=0.3, warmup=3, steps=3)
KEYS = [
    (HPZ, Hierarchy(2, replicated=False), 3),
    (MICS, Hierarchy(2, replicated=True), 3),
    ({"zero_hpz_partition_size": 4}, None, 3),
    ({"mics_shard_size": 4, "mics_hierarchical_params_gather": True}, None, 3),
    ({"mics_shard_size": 1}, None, 0),
    ({"mics_shard_size": -1, "zero_hpz_partition_size": 0}, None, 3),
]
"""Keys, the hierarchy they ask for with four data-parallel ranks, and the stage that they come down to."""

SPEEDS = {"data_rank_speeds": [3, 1, 2, 2]}
CROSSED = {
    1: [
        (KEYS[0], {**SPEEDS, "overlap_update": True}),
        (KEYS[1], {**SPEEDS, "defer_gathers": True, "resident_chunks": 1}),
        (KEYS[0], {"micro_batch_group": 2, "recompute": "none"}),
        (KEYS[1], {"schedule": "1f1b"}),
    ],
    2: [
        (KEYS[0], {**SPEEDS, "pipeline_rank_speeds": [1, 2]}),
        (KEYS[1], {"pipeline_rank_speeds": [2, 1], "micro_batch_group": 2, "resident_chunks": 1}),
        (KEYS[0], {"placement": "contiguous", "overlap_update": True, "chunks_per_rank": 2}),
        (KEYS[1], {"schedule": "interleaved_1f1b", "chunks_per_rank": 2}),
    ],
}
"""Keys and blocks by number of pipeline ranks, with four data-parallel ranks."""


def train_by_keys(keys, pipeline_ranks, block):
    data_ranks = dist.get_world_size() // pipeline_ranks
    reference = train_reference(TRAINING, data_ranks)
    for zero, hierarchy, stage in keys:
        run = train(TRAINING, Layout(pipeline_ranks, data_ranks, 3, block, zero=zero))
        assert (run.engine.program_spec.hierarchy, run.engine.zero_stage) == (hierarchy, stage), zero
        assert run.losses == pytest.approx(reference.losses, rel=1e-6), zero
        assert run.norms == pytest.approx(reference.norms, rel=1e-6), zero
        assert run.evaluation == pytest.approx(reference.evaluation, rel=1e-6), zero
        for step, gradients in enumerate(run.gradients):
            for name, gradient in gradients.items():
                expected = reference.gradients[step][name]
                assert relative(gradient - expected, expected) < 2e-6, (zero, step, name)


@pytest.fixture(scope="module")
def on_four_ranks():
    return run_on_ranks(4, do_all)


def do_all():
    """Does what the tests that are not slow need, in one start of ranks."""
    prepare_rank()
    train_by_keys(KEYS[:2], 1, {})
    return exchange_states(), refuse_all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline_ranks", "keys"), [(1, KEYS[2:]), (2, KEYS[:2])], ids=["degenerate", "two pipeline ranks"]
)
def test_every_size_of_a_node_trains_as_one_process(pipeline_ranks, keys):
    run_on_ranks(4 * pipeline_ranks, train_prepared, keys, pipeline_ranks, {"defer_gathers": True})


def train_prepared(*arguments):
    prepare_rank()
    train_by_keys(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline_ranks", CROSSED)
def test_shards_of_nodes_train_as_one_process_under_other_keys(pipeline_ranks):
    run_on_ranks(4 * pipeline_ranks, train_crossed, pipeline_ranks)


def train_crossed(pipeline_ranks):
    prepare_rank()
    for keys, block in CROSSED[pipeline_ranks]:
        train_by_keys([keys], pipeline_ranks, block)


def use_tensors(zero):
    """Reads and writes parameters in every way, and goes on. Returns what differs from what it must be."""
    engine = initialize(TRAINING, Layout(1, 4, 3, {}, zero=zero))
    engine.train_batch(batches(0, engine))
    module, partition = engine.module, engine.optimizer.partition
    named = dict(module.named_parameters())
    complete = module.state_dict()
    masters = {name: safe_get_full_fp32_param(parameter) for name, parameter in named.items()}
    assert all(torch.equal(masters[name], complete[name]) for name in named)
    # Every rank sets the same values, then rank 3 changes them in a block; both reach all ranks and the next gathers.
    chosen = sorted(named)[:3]
    for name in chosen:
        safe_set_full_fp32_param(named[name], masters[name] + 1)
    with deepspeed.zero.GatheredParameters([named[name] for name in chosen], modifier_rank=3):
        if dist.get_rank() == 3:
            for name in chosen:
                named[name].data.mul_(2)
    changed = module.state_dict()
    for name in named:
        assert torch.equal(changed[name], 2 * (masters[name] + 1) if name in chosen else complete[name]), name
    same = everyone({name: value.sum().item() for name, value in changed.items()})
    assert all(sums == same[0] for sums in same)
    # The state of the optimizer, then a step from it, twice alike.
    state, module_state = engine.optimizer.state_dict(), module.state_dict()
    first = engine.train_batch(batches(1, engine)).item(), module.state_dict()
    engine.optimizer.load_state_dict(state)
    assert all(torch.equal(value, module_state[name]) for name, value in module.state_dict().items())
    again = engine.train_batch(batches(1, engine)).item(), module.state_dict()
    assert first[0] == again[0] and all(torch.equal(first[1][name], again[1][name]) for name in named)
    # Loading whole weights.
    module.load_state_dict(complete)
    assert all(torch.equal(value, complete[name]) for name, value in module.state_dict().items())
    partition.release_all()
    assert all(torch.equal(value, complete[name]) for name, value in module.state_dict().items())
    return state


def exchange_states():
    states = {name: use_tensors(zero) for name, zero in (("hpz", HPZ), ("mics", MICS))}
    engine = initialize(TRAINING, Layout(1, 4, 3, {}))
    said = {}
    for name, state in states.items():
        with pytest.raises(CheckpointError) as refused:
            engine.optimizer.load_state_dict(state)
        said[name] = str(refused.value)
    return said


def test_shards_of_nodes_train_as_one_process_and_are_read_and_written_as_without_nodes(on_four_ranks):
    for said, _ in on_four_ranks:
        assert said["hpz"].startswith("the state of engine.optimizer has shard 2 of 4, but this run has shard 1 of 4;")
        assert "use save_checkpoint and load_checkpoint" in said["mics"]


def losses_in(precision, zero, block):
    training = TRAINING._replace(tied=not block.get("reproducible", False), steps=4)
    stock, layout = json_config, Layout(1, 4, 3, block, zero=zero)
    with_precision = {**stock(training, layout), **precision}
    import tests.integrations.deepspeed.running as running

    running.json_config = lambda *_: with_precision
    try:
        run = train(training, layout)
    finally:
        running.json_config = stock
    return run.losses + run.norms, [run.parameters[name] for name in sorted(run.parameters)]


def train_in_precisions():
    prepare_rank()
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    found = {}
    for name, precision in {
        "bf16": {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
        "bf16 in groups": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6}},
    }.items():
        block = {"micro_batch_group": 2} if "groups" in name else {}
        found[name] = [losses_in(precision, zero, block)[0] for zero in ({}, HPZ, MICS)]
    exact = {}
    for zero in (HPZ, MICS):
        exact[str(zero)] = losses_in({}, zero, {"reproducible": True})
    return found, exact


@pytest.mark.slow
def test_half_precision_trains_as_without_nodes_and_reproducible_nodes_are_equal_to_the_bit():
    for found, exact in run_on_ranks(4, train_in_precisions):
        for name, (plain, *nodes) in found.items():
            for numbers in nodes:
                assert numbers == pytest.approx(plain, rel=2e-2), name
        (first, weights), (second, others) = exact.values()
        assert first == second and all(map(torch.equal, weights, others))


REFUSED = {
    "no divisor": ({"zero_hpz_partition_size": 3}, "zero_optimization.zero_hpz_partition_size is 3, which does not "),
    "too many": ({"mics_shard_size": 8}, "zero_optimization.mics_shard_size is 8, which does not divide 4 data-"),
    "both": ({**HPZ, **MICS}, "zero_optimization.zero_hpz_partition_size is 2 and zero_optimization.mics_shard_size"),
    "no number": ({"mics_shard_size": "2"}, "mics_shard_size is '2'; write a whole number from 1, or -1 for none"),
    "negative": ({"zero_hpz_partition_size": -2}, "zero_hpz_partition_size is -2; write a whole number from 0"),
}


def refuse_all():
    said = {}
    for name, (zero, _) in REFUSED.items():
        with pytest.raises(ConfigError) as refused:
            initialize(TRAINING, Layout(1, 4, 3, {}, zero=zero))
        said[name] = str(refused.value)
    # Nodes of three ranks and of one.
    os.environ[NODE] = "node1" if dist.get_rank() == 3 else "node0"
    try:
        for key in (HPZ, MICS):
            with pytest.raises(ConfigError) as refused:
                initialize(TRAINING, Layout(1, 4, 3, {}, zero=key))
            said[str(key)] = str(refused.value)
    finally:
        del os.environ[NODE]
    return said


def test_nodes_that_cannot_be_are_refused_in_a_sentence(on_four_ranks):
    for _, said in on_four_ranks:
        for name, (_, sentence) in REFUSED.items():
            assert sentence in said[name] and "\n" not in said[name]
        assert "use one of 1, 2, 4" in said["no divisor"]
        for name, key in (("zero_hpz_partition_size", HPZ), ("mics_shard_size", MICS)):
            assert said[str(key)] == (
                f"zero_optimization.{name} is 2, but data-parallel ranks 2 and 3 of one group are in two places, node "
                "node0 and node node1; use a divisor of the 3 ranks of node node0"
            )
