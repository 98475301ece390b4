"""What a script freezes between two batches stays as it is, and goes on as in plain torch once it is unfrozen again."""

from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.freezing import OPTIMIZERS, Case, compare


def test_on_one_rank_frozen_parameters_and_their_state_stay():
    run_on_ranks(1, compare, [Case(number, name, 0, 1) for number, name in enumerate(OPTIMIZERS)])


