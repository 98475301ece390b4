"""A DeepSpeed pipeline script that does not use ds_lgamp. It saves right before it ends, on a slow disk."""

import argparse
import os
import time
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

stock_fsync = os.fsync


def slow_fsync(file) -> None:
    time.sleep(0.2)
    stock_fsync(file)


os.fsync = slow_fsync


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=int(os.environ["LOCAL_RANK"]))
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--end", choices=["return", "destroy", "raise"])
    deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()
    deepspeed.init_distributed("gloo", verbose=False)
    net = PipelineModule([LayerSpec(nn.Linear, 4, 4) for _ in range(2)], num_stages=2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(args=arguments, model=net, optimizer=optimizer)
    data = [(torch.ones(1, 4), torch.zeros(1, 4))] * 2
    engine.train_batch(iter(data))
    begun = time.monotonic()
    engine.save_checkpoint(arguments.checkpoints)
    there = (arguments.checkpoints / "global_step1" / "state.json").exists()
    print(f"SAVED {there} LOADED {engine.load_checkpoint(arguments.checkpoints)[0] is not None}", flush=True)
    engine.train_batch(iter(data))
    engine.save_checkpoint(arguments.checkpoints)
    if arguments.end == "raise" and arguments.local_rank == 1:
        raise ArithmeticError("after the last save")
    if arguments.end == "raise":
        engine.train_batch(iter(data))
    if arguments.end == "destroy":
        deepspeed.comm.destroy_process_group()
    print(f"ENDED {time.monotonic() - begun:.1f}", flush=True)


if __name__ == "__main__":
    main()
