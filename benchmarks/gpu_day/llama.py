"""A small Llama of transformers, trained by plain torch and in a loop of one's own under DeepSpeed."""

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu_day.equality import STEPS, device

VOCABULARY, MICRO_BATCHES = 1024, 4


def tokens(data_ranks: int) -> torch.Tensor:
    """Returns the batch of every step: [data-parallel ranks, micro-batches, samples, sequence]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (data_ranks, MICRO_BATCHES, 2, 128), generator=generator)


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))


def optimizer(trained: LlamaForCausalLM) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained.parameters(), lr=1e-3, eps=1e-3)


def losses_of_plain_torch(batch: torch.Tensor) -> list[float]:
    """Trains the whole batch in this process."""
    trained = model().to(device())
    updates, found = optimizer(trained), []
    for _ in range(STEPS):
        loss = torch.stack([trained(input_ids=each, labels=each).loss for each in batch.flatten(0, 1)]).mean()
        loss.backward()
        updates.step()
        updates.zero_grad()
        found.append(loss.item())
    return found


def losses_of_engine(batch: torch.Tensor, pipeline_ranks: int) -> list[float]:
    """Trains this rank's part of the batch. Returns the mean losses of all ranks."""
    trained = model()
    engine, *_ = deepspeed.initialize(
        model=trained,
        optimizer=optimizer(trained),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 3},
            "ds_lgamp": {"pipeline_ranks": pipeline_ranks},
        },
    )
    engine.train()
    found = []
    for _ in range(STEPS):
        total = torch.zeros((), device=device())
        for each in batch[dist.get_rank()]:
            loss = engine(input_ids=each, labels=each).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach() / MICRO_BATCHES
        dist.all_reduce(total)
        found.append(total.item() / len(batch))
    return found
