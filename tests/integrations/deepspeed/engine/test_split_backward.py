"""Backwards in two parts change no bit of a training, no count of collectives, and memory as the formula says."""

from itertools import product

import pytest
import torch
from torch import nn

from ds_lgamp.config import ConfigError, read_block
from ds_lgamp.runtime.measure import CollectiveCounter
from ds_lgamp.schedule.actions import Kind
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.test_recompute import ATTENDING, engine, gradients_of

LINEAR = [nn.Linear, nn.Tanh] * 4
BLOCKS = [
    {},
    {"recompute": "none"},
    {"recompute": "none", "schedule": "1f1b", "layers_per_chunk": None},
    {"micro_batch_group": 2, "resident_chunks": 1, "placement": "modular"},
    {"offload_activations": "cpu", "placement": "modular"},
    {"overlap_update": True, "defer_gathers": True},
    {"reproducible": True},
]


def second_parts(trained):
    program = trained.lgamp.program(trained.lgamp.own_spec)
    return sum(action.kind is Kind.WEIGHTS_BACKWARD for action in program)


def counted_step(kinds, split, block):
    trained = engine(kinds, 2, split_backward=split, **block)
    with CollectiveCounter() as counter:
        gradients = gradients_of(trained)
    return gradients, sorted(counter.log), second_parts(trained)


def both_ways():
    """Returns the blocks for which a step with parts differs on this rank, and the number of second parts."""
    prepare_rank()
    different, parts = [], 0
    for (number, block), kinds in product(enumerate(BLOCKS), (ATTENDING, LINEAR)):
        whole, calls, _ = counted_step(kinds, False, block)
        split, same_calls, found = counted_step(kinds, (True, 1)[number % 2], block)
        parts += found
        if calls != same_calls or not all(torch.equal(split[name], whole[name]) for name in whole):
            different.append((number, kinds[0].__name__))
    return different, parts


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_and_collectives_of_a_step_stay_the_same(ranks):
    for different, parts in run_on_ranks(ranks, both_ways):
        assert not different
        assert parts > 0


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"split_backward": True, "compile": True}, "split_backward is True, but compile is True"),
        (
            {"split_backward": 2, "recompute": "auto"},
            "split_backward is 2, but recompute is 'auto', which measures whole",
        ),
        ({"split_backward": 0}, "split_backward is 0"),
        ({"split_backward": "yes"}, "split_backward is 'yes'"),
    ],
)
def test_what_has_one_part_only_is_refused(block, message):
    with pytest.raises(ConfigError, match=message):
        read_block({"ds_lgamp": block})
