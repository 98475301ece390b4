"""The benchmark of experts that ranks divide: what ds_lgamp moves is what the formula says, however many micro-batches
there are, and is less than stock DeepSpeed and FSDP2 move."""

import pytest

from benchmarks.contenders import Layout
from benchmarks.divided_experts import (
    DEFAULT,
    DEFERRED,
    RECOMPUTES_NOTHING,
    SHARDED,
    STOCK,
    Traffic,
    count_all,
    predicted,
)
from benchmarks.model import ModelSize

BLOCKS = 3
TINY = ModelSize(blocks=BLOCKS, width=64, sequence=16, vocabulary=64)


@pytest.mark.slow
def test_gathers_and_reductions_of_experts_and_of_the_rest_are_those_of_the_formula():
    layout, micro_batches = Layout(1, 4, TINY), 2
    for traffic, _ in count_all(layout, micro_batches, [DEFAULT])[DEFAULT]:
        # Two chunks are resident, so that the last two of the forward pass need no second gather.
        assert (traffic.gathers, traffic.reductions) == (2 * BLOCKS - 2, BLOCKS)
        assert (traffic.expert_gathers, traffic.expert_reductions) == (2 * BLOCKS - 2, BLOCKS)
        # Sizes, tokens and results in a forward, and gradients of the latter two; all but the last block again.
        assert traffic.all_to_alls == micro_batches * (5 * BLOCKS + 3 * (BLOCKS - 1))
        assert traffic[:-1] == predicted(layout, micro_batches, recomputes=True)


@pytest.mark.slow
def test_experts_without_copies_move_nothing_but_tokens():
    counted = count_all(Layout(1, 2, TINY), 2, [DEFAULT, RECOMPUTES_NOTHING])
    for traffic, _ in counted[DEFAULT] + counted[RECOMPUTES_NOTHING]:
        assert traffic[3:6] == (0, 0, 0) and traffic.tokens_sent > 0
    again, once = (counted[name][0][0].all_to_alls for name in (DEFAULT, RECOMPUTES_NOTHING))
    assert again > once == 2 * 5 * BLOCKS


@pytest.mark.slow
def test_only_peers_move_more_with_more_micro_batches():
    few, many = (count_all(Layout(1, 4, TINY), micro_batches) for micro_batches in (1, 3))

    def moved(traffic: Traffic) -> tuple[int, ...]:
        return traffic[:6]

    for name in (DEFAULT, RECOMPUTES_NOTHING):
        assert [moved(traffic) for traffic, _ in few[name]] == [moved(traffic) for traffic, _ in many[name]]
    for name in (STOCK, SHARDED, DEFERRED):
        for (one, _), (three, _), (own, _) in zip(few[name], many[name], many[DEFAULT]):
            assert three.sent + three.expert_sent > 2 * (one.sent + one.expert_sent)
            assert three.sent + three.expert_sent > 2 * (own.sent + own.expert_sent)
