"""What a script freezes between two batches stays as it is, and goes on as in plain torch once it is unfrozen again."""

from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.freezing import OPTIMIZERS, Case, compare


def test_on_one_rank_frozen_parameters_and_their_state_stay():
    run_on_ranks(1, compare, [Case(number, name, 0, 1) for number, name in enumerate(OPTIMIZERS)])


HOST = {"offload_optimizer": {"device": "cpu"}}


def two_rank_cases():
    overlapping, alone = {"overlap_update": True}, {"resident_chunks": 1, "micro_batch_group": 1}
    return [
        Case(10, "Adam", 3, 2, overlapping, reload=Case(10, "Adam", 1, 1)),
        Case(11, "momentum", 1, 1, alone, reload=Case(11, "momentum", 0, 2)),
        Case(12, "AdamW", 2, 1, {}, HOST, reload=Case(12, "AdamW", 3, 1, alone)),
        Case(13, "AdamW", 2, 1, {}, reload=Case(13, "AdamW", 2, 1)),
        Case(14, "Adagrad", 0, 2),
        Case(15, "Adagrad", 3, 1, {}, reload=Case(15, "Adagrad", 3, 2)),
    ]


def test_on_two_ranks_they_stay_in_every_layout_and_across_checkpoints():
    run_on_ranks(2, compare, two_rank_cases())
