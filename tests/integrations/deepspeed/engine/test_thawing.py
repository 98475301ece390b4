"""What is frozen when the engine is built, and unfrozen in the middle of training, trains on as in plain torch."""

from itertools import product
from tempfile import mkdtemp

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_optimizer_state
from deepspeed.utils.logging import logger

import ds_lgamp
from ds_lgamp.config import ConfigError
from ds_lgamp.partition.agreement import everyone
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.freezing import (
    Case,
    compare,
    engine_of,
    freeze,
    frozen_by_step,
    own_data,
    train,
)
from tests.integrations.deepspeed.running import gathered

HOST = {"offload_optimizer": {"device": "cpu"}}
BOTH_ON_HOST = {**HOST, "offload_param": {"device": "cpu"}}
IN_TURN = {"resident_chunks": 1, "micro_batch_group": 1}
BLOCKS = [{}, {"overlap_update": True}, {"layers_per_chunk": 2}, {"recompute": "none"}]
HOMES = [{"keep_frozen": home} for home in ("device", "host", "none")]
ON_TWO_RANKS = [
    # With the second layer, a rank begins to train at all.
    Case(3, "AdamW", 3, 2, {"overlap_update": True}, thaws=True),
    Case(14, "AdamW", 1, 2, {"recompute": "auto", "recompute_memory": "1 GB"}, thaws=True),
    Case(4, "AdamW", 3, 1, IN_TURN, thaws=True, goes_on="checkpoint", goes_on_at=4, changes={"built_frozen": False}),
]
GOING_ON = [
    # Checkpoints from after the thaw, with other layouts, and engines that have thawed or had nothing to thaw.
    Case(7, "AdamW", 2, 2, tied=True, changes={"stage": 3, "built_frozen": False, "pipeline_ranks": 1}),
    Case(8, "Adam", 3, 1, built_frozen=False, changes={"stage": 1, "built_frozen": True, "pipeline_ranks": 2}),
    Case(9, "momentum", 1, 2, changes={"stage": 3, "pipeline_ranks": 1, "block": IN_TURN}),
    Case(10, "AdamW", 3, 1, zero=HOST, changes={"zero": {}}),
    Case(11, "AdamW", 3, 1, goes_on="live"),
    Case(12, "Adagrad", 2, 2, goes_on="live"),
]


def many(pipeline_ranks):
    choices = [*product(("momentum", "AdamW"), range(4), BLOCKS), *product(("Adagrad", "fused momentum"), (0, 3), [{}])]
    grid = [
        Case(100 + number, *each[:2], pipeline_ranks, each[2], tied=number % 3 == 0, thaws=True)
        for number, each in enumerate(choices)
    ]
    homes = [Case(200 + number, "AdamW", 3, pipeline_ranks, home, thaws=True) for number, home in enumerate(HOMES)]
    hosts = [Case(210, "AdamW", 2, pipeline_ranks, zero=HOST), Case(211, "AdamW", 3, pipeline_ranks, zero=BOTH_ON_HOST)]
    return [*grid, *homes, *(each._replace(thaws=True) for each in hosts)]


def compare_built(cases):
    """Compares with engines that are built with everything trainable. Norms add up in another order."""
    prepare_rank()
    # Some CPUs have fp16, but all of them compute with it.
    get_accelerator().is_fp16_supported = lambda: True
    ds_lgamp.install()
    for case in cases:
        course, expected = train(case), train(case._replace(built_frozen=False))
        assert course.losses == pytest.approx(expected.losses, rel=1e-6), case
        assert course.norms == pytest.approx(expected.norms, rel=1e-6), case
        for name, tensor in course.parameters.items():
            torch.testing.assert_close(tensor, expected.parameters[name], rtol=1e-6, atol=1e-6, msg=f"{case} {name}")


def thaw_beside_others():
    """Returns whether master weights and optimizer state of what trained before are the same to the bit after the thaw,
    and the first chunk with a backward before and after it. Checks that everything has a state after the next step."""
    prepare_rank()
    ds_lgamp.install()
    case = Case(5, "AdamW", 3, 1, thaws=True)
    engine = engine_of(case)
    for step in range(2):
        engine.train_batch(iter(own_data(engine, case, step)))

    def held():
        return {
            segment.shard: [segment.shard.detach().clone(), *(each.clone() for each in state.values())]
            for segment in engine.optimizer.partition.segments()
            if (state := engine.optimizer.state.get(segment.shard))
        }

    before, first = held(), engine.program_spec.first_trained
    engine.module.requires_grad_(True)
    engine.lgamp.thaw()
    after = held()
    assert before
    same = all(torch.equal(*pair) for shard in before for pair in zip(before[shard], after[shard], strict=True))
    engine.train_batch(iter(own_data(engine, case, 2)))
    for parameter in engine.module.parameters():
        moments = safe_get_full_optimizer_state(parameter, "exp_avg")
        assert moments is not None and moments.any() and moments.shape == parameter.ds_shape
    return same and before.keys() == after.keys(), first, engine.program_spec.first_trained


def refusals():
    """Returns the sentences of what cannot be unfrozen, by cause."""
    prepare_rank()
    ds_lgamp.install()
    disk = {"device": "nvme", "nvme_path": everyone(mkdtemp())[0]}
    told = {}

    def refuse(cause, case, unfreeze=lambda model: model.requires_grad_(True)):
        engine = engine_of(case)
        engine.train_batch(iter(own_data(engine, case, 0)))
        unfreeze(engine.module)
        with pytest.raises(ConfigError) as refused:
            engine.train_batch(iter(own_data(engine, case, 1)))
        told[cause] = str(refused.value)
        # Nothing has changed.
        freeze(engine.module, case, 0)
        engine.train_batch(iter(own_data(engine, case, 1)))

    refuse("on a disk", Case(20, "AdamW", 3, 1, zero={"offload_optimizer": disk}, thaws=True))
    refuse("no host before", Case(21, "AdamW", 1, 2, zero=HOST, thaws=True))
    refuse("a tie", Case(22, "AdamW", 1, 2, {"reproducible": True}, tied=True, thaws=True))

    refuse("one rank", Case(23, "AdamW", 3, 1, thaws=True), lambda model: dist.get_rank() or model.requires_grad_(True))
    return told


def leave_without_group():
    """Returns how many parameters of no group a step has changed, and how often the log says that none will."""
    prepare_rank()
    ds_lgamp.install()
    case = Case(24, "AdamW of what trains", 2, 1, thaws=True)
    engine, said = engine_of(case), []
    logger.warning = lambda text: said.append(text)
    engine.module.requires_grad_(True)
    partition = engine.optimizer.partition
    before = gathered(partition, lambda unit: unit.storage.shard)
    engine.train_batch(iter(own_data(engine, case, 0)))
    after = gathered(partition, lambda unit: unit.storage.shard)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    frozen = frozen_by_step(case)[0]
    assert changed == before.keys() - frozen
    return sorted(text for text in said if "no parameter group holds it" in text)


def test_on_one_rank_unfrozen_parameters_train():
    run_on_ranks(1, compare, [Case(1, "AdamW", 0, 1, thaws=True), Case(2, "momentum", 3, 1, thaws=True)])


def test_on_two_ranks_they_train_and_go_on_from_a_checkpoint():
    run_on_ranks(2, compare, ON_TWO_RANKS)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "pipeline_ranks"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_they_train_with_every_optimizer_stage_and_home(ranks, pipeline_ranks):
    run_on_ranks(ranks, compare, many(pipeline_ranks))


@pytest.mark.slow
def test_checkpoints_and_live_states_go_on_with_other_layouts():
    cases = [each._replace(goes_on=each.goes_on or "checkpoint", thaws=True, goes_on_at=4) for each in GOING_ON]
    run_on_ranks(2, compare, cases)


@pytest.mark.slow
def test_they_train_as_in_an_engine_that_is_built_with_them():
    bf16, fp16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}
    cases = [
        Case(30, "AdamW", 3, 1, more=bf16, thaws=True),
        Case(31, "momentum", 1, 2, more=bf16, thaws=True),
        Case(32, "AdamW", 2, 1, more=fp16, thaws=True),
        Case(33, "Lamb", 3, 1, thaws=True),
        Case(34, "Lamb", 1, 2, tied=True, thaws=True),
        Case(35, "Muon", 3, 1, thaws=True),
        Case(36, "Muon", 0, 2, thaws=True),
        Case(37, "AdamW", 3, 1, {"nonfinite": "skip", "reproducible": True}, thaws=True),
        Case(38, "AdamW", 3, 1, {"overlap_update": True}, BOTH_ON_HOST, bf16, thaws=True),
        Case(39, "AdamW", 3, 1, {"regather": "host", **IN_TURN}, thaws=True),
    ]
    run_on_ranks(2, compare_built, cases)


@pytest.mark.slow
def test_shards_of_nodes_train_them():
    zero = [{"zero_hpz_partition_size": 2}, {"mics_shard_size": 2}]
    cases = [Case(40 + number, "AdamW", 3, 1, zero=each, thaws=True) for number, each in enumerate(zero)]
    run_on_ranks(4, compare, cases)


@pytest.mark.slow
def test_what_trained_before_stays_to_the_bit():
    assert run_on_ranks(2, thaw_beside_others) == [(True, 2, 0)] * 2


@pytest.mark.slow
def test_what_cannot_be_unfrozen_is_refused():
    for told in run_on_ranks(2, refusals):
        pattern = "parameter {} was unfrozen after deepspeed.initialize, but {}; unfreeze it before that"
        assert told["on a disk"] == pattern.format("0.gain", "state of the optimizer lies on a disk")
        nothing = "nothing else on its pipeline rank trained with offload_optimizer"
        assert told["no host before"] == pattern.format("1.gain", nothing)
        assert "share the tied module 'ends', whose gradients add up" in told["a tie"]
        assert told["one rank"].endswith("trains on one rank and is frozen on another; freeze it on all")


@pytest.mark.slow
def test_without_a_parameter_group_they_stay():
    assert len(run_on_ranks(1, leave_without_group)[0]) == 7
