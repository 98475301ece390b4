"""Trains a small GPT-2 of transformers for two steps, as a user's script would, and prints its losses."""

import argparse

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

STEPS, LENGTH = 2, 16

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed", required=True)
parser.add_argument("--local_rank")
parser.add_argument("--layers", type=int, required=True)
options = parser.parse_args()

deepspeed.init_distributed()
torch.manual_seed(0)
sizes = {"vocab_size": 64, "n_positions": LENGTH, "n_embd": 32, "n_layer": options.layers, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=options.deepspeed)

accumulation, micro_batch = engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu()
samples = STEPS * accumulation * micro_batch * torch.distributed.get_world_size()
data = list((torch.arange(samples)[:, None] + torch.arange(LENGTH)) % 64)
total = 0.0
for number, tokens in enumerate(DataLoader(data, micro_batch, sampler=DistributedSampler(data)), start=1):
    tokens = tokens.to(engine.device)
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    total += loss.item()
    if number % accumulation == 0:
        if torch.distributed.get_rank() == 0:
            print(f"loss {total / accumulation:.6f} of {engine.train_batch_size()} samples", flush=True)
        total = 0.0
torch.distributed.destroy_process_group()
