"""A DeepSpeed job whose last rank breaks in its third step, in the way that the first argument names. The second one
names the engine: "pipeline" for a PipelineModule, "plain" for an nn.Sequential. The third is a folder: every rank
leaves a file there with its number and its process, and the rank that breaks leaves the file "broken"."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

fault, kind, folder = [word for word in sys.argv[1:] if not word.startswith("--")]
HANG_TIMEOUT, BREAKS_AT = 6, 3
LAUNCHER = "kills its launcher"
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 1},
}
PAIR = torch.ones(1, 4), torch.zeros(1, 4)
step = 0


def raises() -> None:
    raise ArithmeticError("the layer is in trouble")


def sends_itself(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


FAULTS = {
    "raises": raises,
    "is killed": lambda: sends_itself(signal.SIGKILL),
    "is terminated": lambda: sends_itself(signal.SIGTERM),
    "segfaults": lambda: ctypes.string_at(0),
    "exits": lambda: os._exit(0),
    "stops": lambda: sends_itself(signal.SIGSTOP),
    "sleeps": lambda: time.sleep(1000),
    LAUNCHER: lambda: os.kill(os.getppid(), signal.SIGKILL),
}
"""What happens in the forward of a layer."""


def break_now() -> None:
    broken = Path(folder) / "broken"
    if not broken.exists():
        broken.touch()
        FAULTS[fault]()


class Breaks(nn.Module):
    """The last layer. It also returns the loss of plain models."""

    def forward(self, pair):  # noqa: ANN001, ANN201
        if step == BREAKS_AT and fault in FAULTS and dist.get_rank() == dist.get_world_size() - 1:
            break_now()
        return nn.functional.mse_loss(*pair) if kind == "plain" else pair


class Hidden(nn.Linear):
    """A layer that passes the labels on in plain models."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, pair):  # noqa: ANN001, ANN201
        return (super().forward(pair[0]), pair[1]) if kind == "plain" else super().forward(pair)


def micro_batches():  # noqa: ANN201
    while True:
        if step == BREAKS_AT and fault == "has no data" and dist.get_rank() == dist.get_world_size() - 1:
            (Path(folder) / "broken").touch()
            time.sleep(1000)
        yield PAIR


def main() -> None:
    global step
    deepspeed.init_distributed("gloo", verbose=False)
    rank = dist.get_rank()
    (Path(folder) / f"rank {rank}").write_text(str(os.getpid()))
    config = {**CONFIG, "ds_lgamp": {"hang_timeout": HANG_TIMEOUT}}
    if kind == "plain":
        config["ds_lgamp"]["pipeline_ranks"] = 2
        engine, *_ = deepspeed.initialize(model=nn.Sequential(Hidden(), Hidden(), Breaks()), config=config)
    else:
        layers = [LayerSpec(Hidden), LayerSpec(Hidden), LayerSpec(Breaks)]
        net = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
        engine, *_ = deepspeed.initialize(model=net, config=config)
    data = micro_batches()
    for step in range(1, 10 if fault != LAUNCHER else 1_000_000):
        if step == BREAKS_AT and fault == "returns" and rank == dist.get_world_size() - 1:
            (Path(folder) / "broken").touch()
            return
        if kind == "plain":
            for _ in range(2):
                engine.backward(engine(PAIR))
                engine.step()
        else:
            engine.train_batch(data)


if __name__ == "__main__":
    main()
