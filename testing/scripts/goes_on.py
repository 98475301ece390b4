"""A DeepSpeed pipeline script that may be killed and started again, on other numbers of ranks. It does not use
ds_lgamp. Rank 0 appends a line for every step to a file."""

import argparse
import json
import os
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.utils.data import TensorDataset

WIDTH, SAMPLES = 8, 96


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*torch.randn(2, SAMPLES, WIDTH, generator=generator))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=int(os.environ["LOCAL_RANK"]))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--save-interval", type=int)
    parser.add_argument("--seconds", type=float, help="what a step takes at least")
    parser.add_argument("--pipeline-ranks", type=int)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--losses", type=Path)
    deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()
    deepspeed.init_distributed("gloo", verbose=False)
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    # The weights of a layer depend on its place, not on the layout.
    seeds = {"seed_layers": True, "seed_fn": lambda value: torch.manual_seed(int(value)), "base_seed": 3}
    net = PipelineModule(layers, num_stages=arguments.pipeline_ranks, loss_fn=nn.functional.mse_loss, **seeds)
    engine, *_ = deepspeed.initialize(args=arguments, model=net, training_data=samples())
    engine.load_checkpoint(arguments.checkpoints)
    while engine.global_steps < arguments.steps:
        begun = time.monotonic()
        rate = engine.get_lr()[0]
        loss = engine.train_batch().item()
        if dist.get_rank() == 0:
            with open(arguments.losses, "a") as log:
                line = {"step": engine.global_steps, "loss": loss, "rate": rate, "ranks": dist.get_world_size()}
                log.write(json.dumps({**line, "time": time.time()}) + "\n")
        if engine.global_steps % arguments.save_interval == 0:
            engine.save_checkpoint(arguments.checkpoints)
        time.sleep(max(0.0, begun + arguments.seconds - time.monotonic()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
