"""What a script freezes between two batches stays as it is, and goes on as in plain torch once it is unfrozen again."""

from itertools import product

import pytest

from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.freezing import (
    OPTIMIZERS,
    Case,
    compare,
    count_changes,
    refuse_on_a_disk,
    return_to_a_state_from_before,
)

HOST = {"offload_optimizer": {"device": "cpu"}}
OVERLAPPING, IN_TURN = {"overlap_update": True}, {"resident_chunks": 1, "micro_batch_group": 1}
BLOCKS = [{}, OVERLAPPING, IN_TURN, {"recompute": "none"}, {"layers_per_chunk": 2}]
ON_TWO_RANKS = [
    Case(10, "Adam", 3, 2, OVERLAPPING, goes_on="checkpoint", changes={"stage": 1, "pipeline_ranks": 1}),
    Case(11, "momentum", 1, 1, IN_TURN, goes_on="checkpoint", changes={"stage": 0, "pipeline_ranks": 2}),
    Case(12, "AdamW", 2, 1, {}, HOST, goes_on="checkpoint", changes={"zero": {}}),
    Case(13, "AdamW", 2, 1, goes_on="state"),
    Case(40, "AdamW", 3, 1, goes_on="live"),
    Case(15, "Adagrad", 0, 2),
    Case(16, "AdamW", 1, 2, tied=True, goes_on="checkpoint", changes={"pipeline_ranks": 1}),
]


def many(pipeline_ranks):
    choices = product(OPTIMIZERS, range(4), BLOCKS)
    return [
        Case(100 + number, *each[:2], pipeline_ranks, each[2], tied=number % 3 == 0)
        for number, each in enumerate(choices)
    ]


def test_on_one_rank_frozen_parameters_and_their_state_stay():
    # In the second case a parameter has no first step before others have momentum.
    run_on_ranks(1, compare, [Case(number, name, 0, 1) for number, name in enumerate(OPTIMIZERS, start=1)])


def test_on_two_ranks_they_stay_in_several_layouts_and_across_checkpoints():
    run_on_ranks(2, compare, ON_TWO_RANKS)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "pipeline_ranks"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_they_stay_with_every_optimizer_stage_and_schedule(ranks, pipeline_ranks):
    run_on_ranks(ranks, compare, many(pipeline_ranks))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_in_half_precision_they_stay_to_the_bit(ranks):
    precisions = [{"bf16": {"enabled": True, "check_grad_overflow": checks}} for checks in (False, True)]
    choices = product(OPTIMIZERS, (0, 3), precisions)
    cases = [Case(500 + number, *each[:2], ranks, more=each[2]) for number, each in enumerate(choices)]
    for counts in run_on_ranks(ranks, count_changes, cases):
        for case, (frozen, others) in zip(cases, counts, strict=True):
            assert frozen == 0 and others > 0, case


@pytest.mark.slow
def test_on_a_disk_they_are_refused():
    sentence = (
        "was frozen after deepspeed.initialize, but state of the optimizer lies on a disk, where it cannot be left "
        "out; freeze it before, or offload to the device cpu"
    )
    for told in run_on_ranks(1, refuse_on_a_disk)[0]:
        assert sentence in told


@pytest.mark.slow
def test_a_state_of_the_optimizer_from_before_is_refused():
    (told,) = run_on_ranks(1, return_to_a_state_from_before)
    assert told == (
        "the state of engine.optimizer is from a time before a parameter was frozen; use save_checkpoint and "
        "load_checkpoint"
    )
