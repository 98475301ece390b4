"""A rank of a test notices an engine that is not the one its block asks for."""

import deepspeed
import pytest
import torch

import ds_lgamp
from ds_lgamp.integrations.deepspeed.hook.notice import notice_nothing
from testing.deepspeed_rank import is_ours, prepare_rank, quiet
from testing.ranks import run_on_ranks


def engine_of(block, installs):
    """Returns whether the engine is ours; instead the error, if there is one."""
    # Where torch calls ds_lgamp, the import of deepspeed is no stock one.
    notice_nothing()
    prepare_rank()
    if installs:
        ds_lgamp.install()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    config = {"train_micro_batch_size_per_gpu": 1, "ds_lgamp": block}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with quiet():
            return is_ours(deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0])
    except AssertionError as error:
        return str(error)


@pytest.mark.parametrize(
    ("block", "installs", "ours"), [({"outputs": "all"}, True, True), ({"enabled": False}, True, False)]
)
def test_the_engine_of_a_block_is_ours(block, installs, ours):
    assert run_on_ranks(1, engine_of, block, installs) == [ours]


def test_stock_deepspeed_beside_a_block_fails_the_test():
    (error,) = run_on_ranks(1, engine_of, {}, False)
    assert error.startswith("DeepSpeedEngine is the engine for {'train_micro")
