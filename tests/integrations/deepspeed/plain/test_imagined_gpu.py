"""A step of a plain script on an imagined GPU: no host waits for its device, whatever the engine returns."""

from contextlib import nullcontext

import deepspeed
import pytest
import torch
from torch import nn

from testing.deepspeed_rank import quiet
from testing.imagined_gpu.accelerator import BACKEND, prepare_rank
from testing.imagined_gpu.border import imagine
from testing.imagined_gpu.device import AVAILABLE, DEVICE
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.test_imagined_gpu import prepare_deepspeed

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this torch has no devices that Python describes")
WIDTH, MICRO_BATCHES, STEPS = 6, 2, 3
CASES = {
    "loss, stage 3": (3, {}),
    "loss, stage 1": (1, {"overlap_update": True}),
    "outputs, stage 3": (3, {"outputs": "all"}),
    "outputs, stage 2": (2, {"outputs": "all", "recompute": "none"}),
}
"""ZeRO stage and block."""


class MeanSquare(nn.Module):
    def forward(self, hidden):
        return hidden.square().mean()


def train(stage, block):
    """Trains on two pipeline ranks. From the second step on, the host must not wait for the device."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    of_loss = "outputs" not in block
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "steps_per_print": MICRO_BATCHES * STEPS + 1,
        "ds_lgamp": {"pipeline_ranks": 2, **block},
    }
    model = nn.Sequential(*layers, *([MeanSquare()] if of_loss else []))
    with quiet():
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    for step in range(STEPS):
        with DEVICE.step() if step else nullcontext():
            for _ in range(MICRO_BATCHES):
                result = engine(torch.randn(4, WIDTH))
                engine.backward(result if of_loss else result.square().mean())
                engine.step()
    return engine.global_steps


def train_all():
    prepare_deepspeed()
    with imagine():
        return {name: train(*case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def trained():
    return run_on_ranks(4, train_all, before_init=prepare_rank, backend=BACKEND)


@pytest.mark.parametrize("name", CASES)
def test_no_step_waits_for_the_device(trained, name):
    assert [rank[name] for rank in trained] == [STEPS] * 4
