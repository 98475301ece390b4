"""Fine-tunes what pretrain_bert.py wrote, on a task of the same text: from which source does a passage come?

    torchrun --standalone --nproc_per_node 2 launch/finetune_bert.py --deepspeed_config example_configs/bert.json \\
        --data data/pydoc.bert --model runs/bert/model

The sources are the files that prepare_data.py got, or help topics and library if it got none. With --from-scratch the
same model begins with random weights, which shows what the pretraining is worth.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from itertools import islice
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from bert_data import (
    SOURCES,
    TRAINING,
    VALIDATION,
    PreparedData,
    Sample,
    micro_batches,
    passage,
    rows_of,
    samples_of_rank,
)
from deepspeed.accelerator import get_accelerator
from transformers import BertConfig, BertForSequenceClassification


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder that prepare_data.py --bert wrote")
    parser.add_argument("--model", required=True, help="folder of the model, such as runs/bert/model")
    parser.add_argument("--from-scratch", action="store_true", help="take the model's sizes only")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32, help="passages of a step, over all ranks")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)), help="set by launchers")
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    if args.deepspeed_config is None:
        parser.error("--deepspeed_config is required")
    return args


def build_engine(args: argparse.Namespace, data: PreparedData, micro_batch: int) -> Any:
    torch.manual_seed(args.seed)
    classes = len(data.sources)
    if args.from_scratch:
        model = BertForSequenceClassification(BertConfig.from_pretrained(args.model, num_labels=classes))
    else:
        model = BertForSequenceClassification.from_pretrained(args.model, num_labels=classes)
    config = json.loads(Path(args.deepspeed_config).read_text())
    config |= {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": 1}
    config["optimizer"]["params"]["lr"] = args.lr
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.train()  # from_pretrained returns models in evaluation mode
    return engine


@torch.no_grad()
def accuracy(engine: Any, data: PreparedData, micro_batch: int) -> tuple[float, float]:
    """Returns the share of held-out passages that the model tells, and that of the most frequent source."""
    engine.eval()
    shards = data.shards(SOURCES, VALIDATION)
    ranks, first = dist.get_world_size(), dist.get_rank()
    # All ranks call the engine equally often. So the last few passages are left out.
    own = range(first, shards.rows[0] - shards.rows[0] % (ranks * micro_batch), ranks)
    right, counts = torch.zeros(1, device=engine.device), torch.zeros(len(data.sources), device=engine.device)
    for batch in micro_batches(rows_of(shards, passage, (Sample(0, 0, row) for row in own)), micro_batch):
        batch = {name: tensor.to(engine.device) for name, tensor in batch.items()}
        right += (engine(**batch).logits.argmax(-1) == batch["labels"]).sum()
        counts += torch.bincount(batch["labels"], minlength=len(counts))
    engine.train()
    for sums in (right, counts):
        dist.all_reduce(sums)
    return (right / counts.sum()).item(), (counts.max() / counts.sum()).item()


def main() -> None:
    args = parse_arguments()
    deepspeed.utils.logger.setLevel(logging.ERROR)
    data = PreparedData(args.data)
    get_accelerator().set_device(args.local_rank)
    deepspeed.init_distributed()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    micro_batch, rest = divmod(args.batch_size, ranks)
    if rest or not micro_batch:
        raise SystemExit(f"--batch-size is {args.batch_size}, which is no multiple of the {ranks} ranks; use one")
    engine = build_engine(args, data, micro_batch)
    shards = data.shards(SOURCES, TRAINING)
    samples = samples_of_rank(shards.rows, args.seed, rank, ranks)
    for batch in islice(micro_batches(rows_of(shards, passage, samples), micro_batch), args.steps):
        engine.backward(engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss)
        engine.step()
    found, frequent = accuracy(engine, data, micro_batch)
    if rank == 0:
        print(f"held-out passages: accuracy {found:.4f} (always the most frequent source: {frequent:.4f})", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
