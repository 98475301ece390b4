"""Trains a LightningModule around a model of transformers by Lightning's DeepSpeedStrategy:
``lightning_module.py --model_name_or_path DIR --data FILE`` and arguments by the names of transformers' Trainer.

Two stand-ins let it run on the CPU: DeepSpeedStrategy takes no other accelerator than that of CUDA, and devices of the
CPU have no index by which Lightning finds the rank's own.
"""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer

RANKS = 2
LENGTH = 16
"""Of every text, in tokens."""


class Words(pl.LightningModule):
    """Predicts the next word with a head of its own."""

    def __init__(self, folder: str, rate: float) -> None:
        super().__init__()
        self.rate, self.history = rate, list[dict[str, float]]()
        self.model = AutoModel.from_pretrained(folder)
        config = self.model.config
        self.head = nn.Linear(config.hidden_size, config.vocab_size)

    def training_step(self, tokens: Tensor, _number: int) -> Tensor:
        hidden = self.model(input_ids=tokens).last_hidden_state
        loss = nn.functional.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.history.append({"loss": loss.item()})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.rate)


def main() -> None:
    given = _arguments()
    torch.manual_seed(0)
    module = Words(given.model_name_or_path, given.learning_rate)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=DeepSpeedStrategy(config=_configuration(given)),
        max_steps=given.max_steps,
        accumulate_grad_batches=given.gradient_accumulation_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(_rows(given), batch_size=given.per_device_train_batch_size)
    trainer.fit(module, loader)
    folder = Path(given.output_dir, f"checkpoint-{trainer.global_step}")
    trainer.save_checkpoint(folder)
    if trainer.is_global_zero:
        # As transformers' Trainer writes it.
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": module.history}))


def _arguments() -> Namespace:
    parser = ArgumentParser()
    for name in ("model_name_or_path", "data", "deepspeed", "output_dir"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning_rate", type=float, required=True)
    return parser.parse_known_args()[0]


def _configuration(given: Namespace) -> dict[str, Any]:
    """Returns the configuration without the values that the Trainer fills in, and with the size of Lightning's
    batches."""
    config = {key: value for key, value in json.loads(Path(given.deepspeed).read_text()).items() if value != "auto"}
    return {**config, "train_micro_batch_size_per_gpu": given.per_device_train_batch_size}


def _rows(given: Namespace) -> Any:
    """Returns the tokens of all texts."""
    tokenizer = AutoTokenizer.from_pretrained(given.model_name_or_path)
    tokenizer.pad_token = tokenizer.eos_token
    texts = [row["instruction"] for row in json.loads(Path(given.data).read_text())]
    return tokenizer(texts, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt").input_ids


if __name__ == "__main__":
    CPUAccelerator.get_parallel_devices = staticmethod(
        lambda devices: [torch.device("cpu", index) for index in range(devices)]
    )
    with patch("lightning.pytorch.strategies.deepspeed.CUDAAccelerator", CPUAccelerator):
        main()
