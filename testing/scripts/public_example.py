"""An ordinary DeepSpeed pipeline script like the public examples. It does not use ds_lgamp.

It has layer specifications with a tied embedding, its own optimizer with momentum and two weight-decay groups over
``net.parameters()``, and weights loaded before ``deepspeed.initialize``.
"""

import argparse
import os
import signal
import time

import deepspeed
import deepspeed.ops
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class EmbeddingPipe(nn.Embedding):
    """An embedding that is also the transposed head."""


def head(embedding: EmbeddingPipe, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ embedding.weight.T


class BlockPipe(nn.Module):
    def __init__(self, width: int, number: int, arguments: argparse.Namespace) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.trouble = arguments.trouble if number == 3 else "none"
        self.calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 12 and self.trouble != "none":
            # Writes the line in one call, because another rank may write at the same time.
            print(f"TROUBLE {time.time()}\n", end="", flush=True)
            if self.trouble == "raise":
                raise ArithmeticError("the layer is in trouble")
            os.kill(os.getpid(), signal.SIGKILL)
        return hidden + torch.tanh(self.inner(self.norm(hidden)))


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def data(engine):
    generator = torch.Generator().manual_seed(engine.grid.data_parallel_id)
    while True:
        tokens = torch.randint(0, 13, (2, 9), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=int(os.environ["LOCAL_RANK"]))
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--trouble", choices=["none", "raise", "kill"], default="none")
    parser.add_argument("--checkpoint", help="weights of the embedding to start from")
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(1)
    layers = [
        TiedLayerSpec("embed", EmbeddingPipe, 13, 8),
        *(LayerSpec(BlockPipe, 8, number, arguments) for number in range(6)),
        LayerSpec(nn.LayerNorm, 8),
        TiedLayerSpec("embed", EmbeddingPipe, 13, 8, forward_fn=head),
    ]
    net = PipelineModule(layers, num_stages=arguments.stages, loss_fn=loss_fn)
    if arguments.checkpoint and "embed" in net.tied_modules:
        net.tied_modules["embed"].load_state_dict(torch.load(arguments.checkpoint, weights_only=True))
    matrices = [parameter for parameter in net.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in net.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    engine, _, _, _ = deepspeed.initialize(args=arguments, model=net, optimizer=optimizer)
    batches = data(engine)
    losses = [engine.train_batch(data_iter=batches).item() for _ in range(5)]
    if engine.global_rank == 0:
        print("RESULT", type(engine).__name__, *losses, flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
