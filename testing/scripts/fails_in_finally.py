"""A DeepSpeed script whose last rank fails between two micro-batches of its third step, and then leaves by code that
most scripts have: it destroys the process group, or waits for the others.

Arguments: the engine ("plain", "pipeline", or "data", a pipeline whose data fail), the way to leave, and ``--install``
without ``ds_lgamp run``.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

kind, way = sys.argv[1:3]
if "--install" in sys.argv:
    import ds_lgamp

    ds_lgamp.install()

import deepspeed  # noqa: E402 as a user would, after install
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule  # noqa: E402
from torch import nn  # noqa: E402

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 1},
    "ds_lgamp": {"hang_timeout": 6 if way == "barrier" else 60},
}


class Loss(nn.Module):
    """Blocks with a loss behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.float()
        for block in self.blocks:
            inputs = block(inputs)
        return inputs.square().mean()


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for number in range(1000):
        if kind == "data" and number == 5:
            fail()
        yield torch.ones(1, 4), torch.zeros(1, 4)


def fail() -> None:
    """Fails on the last rank."""
    if dist.get_rank() < dist.get_world_size() - 1:
        return
    try:
        raise ValueError("the data are broken")
    except ValueError:
        if way == "exit":
            sys.exit(3)
        raise


def train() -> None:
    data = batches()
    if kind != "plain":
        layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(2)]
        net = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
        engine, *_ = deepspeed.initialize(model=net, config=CONFIG)
        for step in range(100):
            if step == 2 and kind == "pipeline":
                fail()
            engine.train_batch(data)
    CONFIG["ds_lgamp"]["pipeline_ranks"] = 2
    engine, *_ = deepspeed.initialize(model=Loss(), config=CONFIG)
    for step in range(100):
        for micro_batch in range(2):
            if step == 2 and micro_batch == 1:
                fail()
            engine.backward(engine(next(data)[0]))
            engine.step()


@contextmanager
def process_group() -> Iterator[None]:
    try:
        yield
    finally:
        dist.destroy_process_group()


def generator() -> Iterator[None]:
    with process_group():
        yield


class Waits:
    """A context that waits for all ranks."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        dist.barrier()


def main() -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    if way == "with":
        with process_group():
            train()
    elif way == "barrier":
        with Waits():
            train()
    elif way == "generator":
        held = generator()
        next(held)
        try:
            train()
        finally:
            held.close()
    elif way == "handler":
        import atexit

        atexit.register(dist.destroy_process_group)
        train()
    else:
        try:
            train()
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
