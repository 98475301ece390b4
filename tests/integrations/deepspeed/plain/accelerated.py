"""Trains with Accelerate's own loop, and with transformers' Trainer. torchrun starts it as a script for the latter."""

import json
import os
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin
from deepspeed.accelerator import get_accelerator
from transformers import AutoModelForCausalLM

import ds_lgamp
from ds_lgamp.integrations.deepspeed.hook.initialize import compile_no_collective
from testing.deepspeed_rank import is_ours, prepare_rank, quiet
from testing.scripts import trains_with_trainer
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, RATE, STEPS, configuration, loss_of, made
from tests.integrations.transformers.models import micro_batch

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
AUTO: dict[str, Any] = {
    **dict.fromkeys(SIZES, "auto"),
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
}
"""What documents of transformers recommend."""
WORDS = (
    "--use_cpu --per_device_train_batch_size 2 --per_device_eval_batch_size 2 --gradient_accumulation_steps 4 "
    "--logging_steps 1 --report_to none --learning_rate 1e-2 --max_grad_norm 0.5 --warmup_steps 3 --disable_tqdm true "
    "--log_level error --save_strategy no"
).split()


def prepare() -> None:
    """Sets what torchrun would set."""
    prepare_rank()
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    # Accelerate would start threads, which a forked process cannot.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    ds_lgamp.install()


def train_with_trainer(folder: str, runs: Sequence[tuple[str, int, dict[str, Any] | None, str]]) -> None:
    """Runs the Trainer's script several times on each rank that torchrun has started.

    Args:
        folder: each run has a folder of its own in it, where it leaves its history.
        runs: the name of each, its ZeRO stage, its block, which is None for stock DeepSpeed, and its words for the
            command line.
    """
    compile_no_collective()
    ds_lgamp.install()
    # As Accelerate does on a GPU. zero.Init would take this for the only rank otherwise, stock's too.
    deepspeed.init_distributed("gloo")
    # It computes in fp16, slowly.
    get_accelerator().is_fp16_supported = lambda: True
    for name, stage, block, words in runs:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        config = {
            **AUTO,
            "ds_lgamp": {"enabled": False} if block is None else block,
            "zero_optimization": {**AUTO["zero_optimization"], "stage": stage},
        }
        given = ["--deepspeed", json.dumps(config), "--output_dir", str(Path(folder, name)), *WORDS]
        trainer = trains_with_trainer.main([*given, *words.format(folder=folder).split()])
        assert is_ours(trainer.deepspeed) == (block is not None)
        if block is not None:
            trainer.deepspeed.wait_for_checkpoint()
    dist.destroy_process_group()


def train_with_accelerate(
    stage: int, block: dict[str, Any], pretrained: str, folder: str
) -> tuple[list[float], list[float]]:
    """Returns the sums of this rank's losses by step, and those of the last step once more, from a saved state on.

    Args:
        stage: the ZeRO stage.
        block: the block.
        pretrained: the folder of the model. At stage 3, transformers draws other weights for a new model than it does
            elsewhere, with stock DeepSpeed too.
        folder: takes the state, and then the trained model.
    """
    prepare()
    config = {**configuration(stage, block), "gradient_accumulation_steps": "auto"}
    config["train_micro_batch_size_per_gpu"] = "auto"
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = _accelerator(plugin)
    model = AutoModelForCausalLM.from_pretrained(pretrained).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = torch.utils.data.DataLoader(_data(), batch_size=2)
    with quiet():
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    assert is_ours(model)
    losses = _epoch(accelerator, model, optimizer, loader, scheduler, folder)
    accelerator.load_state(folder)
    again = _epoch(accelerator, model, optimizer, accelerator.skip_first_batches(loader, 4), scheduler, None)
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=state
    )
    return losses, again


def train_own_model_with_accelerate(name: str, stage: int, block: dict[str, Any]) -> list[float]:
    """Returns the sums of this rank's losses by step."""
    prepare()
    accelerator = _accelerator(DeepSpeedPlugin(hf_ds_config=configuration(stage, block)))
    model = made(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with quiet():
        model, optimizer = accelerator.prepare(model, optimizer)
    assert is_ours(model)
    losses = [0.0] * STEPS
    for step, number in product(range(STEPS), range(MICRO_BATCHES)):
        with accelerator.accumulate(model):
            loss = loss_of(name, model, step, dist.get_rank(), number)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses[step] += loss.item()
    return losses


def _accelerator(plugin: DeepSpeedPlugin) -> Accelerator:
    # Accelerator(cpu=True) would set the plugin aside, and train with torch's DDP.
    PartialState(cpu=True)
    return Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=MICRO_BATCHES)


def _data() -> list[dict[str, torch.Tensor]]:
    """Makes the sequences of all steps, in the order in which Accelerate hands them to ranks."""
    batches = [
        micro_batch(step, rank, number)
        for step in range(STEPS)
        for number in range(MICRO_BATCHES)
        for rank in range(dist.get_world_size())
    ]
    return [{key: values[row] for key, values in batch.items()} for batch in batches for row in range(2)]


def _epoch(
    accelerator: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any, folder: str | None
) -> list[float]:
    losses = [0.0]
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                assert accelerator.clip_grad_norm_(model.parameters(), 100.0) > 0
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses[-1] += loss.item()
        if accelerator.sync_gradients:
            losses.append(0.0)
        if folder is not None and number == (STEPS - 1) * MICRO_BATCHES - 1:
            accelerator.save_state(folder)
    return losses[:-1]


if __name__ == "__main__":
    train_with_trainer(sys.argv[1], json.loads(sys.argv[2]))
