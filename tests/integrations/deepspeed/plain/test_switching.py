"""Adapters that a script switches between batches train as in one process: one that is not in use stays as it is."""

import pytest

from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain.switching import alone, train

BLOCKS = [{"pipeline_ranks": 1}, {"pipeline_ranks": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_adapter_that_is_not_in_use_stays_and_goes_on(ranks):
    cases = [(stage, block) for stage in (0, 1, 2, 3) for block in BLOCKS[:ranks]]
    expected = alone(ranks)
    for rank, courses in enumerate(run_on_ranks(ranks, train, cases)):
        for case, losses in zip(cases, courses, strict=True):
            assert losses == pytest.approx(expected[rank], rel=1e-5), case
