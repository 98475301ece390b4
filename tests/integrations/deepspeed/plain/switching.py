"""Trains a model with two adapters of peft of which each batch trains one, by ``engine(batch)`` and in one process."""

from typing import Any

import deepspeed
import peft
import torch
import torch.distributed as dist

import ds_lgamp
from testing.deepspeed_rank import prepare_rank, quiet
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, configuration
from tests.integrations.transformers.models import make, micro_batch

TURNS = ("one", "two", "two", "one", "both", "one", "two")
"""The adapters by batch."""


def _model() -> Any:
    torch.manual_seed(3)
    options = peft.LoraConfig(r=2, init_lora_weights=False)
    model = peft.get_peft_model(make("Llama"), options, adapter_name="one")
    model.add_adapter("two", options)
    _switch(model, "both")
    return model


def _switch(model: Any, adapter: str) -> None:
    model.base_model.set_adapter(["one", "two"] if adapter == "both" else adapter)


def _optimizer(model: Any) -> torch.optim.Optimizer:
    trained = [each for each in model.parameters() if each.requires_grad]
    assert len({each.shape for each in trained}) > 1
    return torch.optim.AdamW(trained, lr=0.02, eps=1e-3, weight_decay=0.1)


def alone(ranks: int) -> list[list[float]]:
    """Returns the losses of every rank, by batch."""
    model, losses = _model(), []
    optimizer = _optimizer(model)
    for step, adapter in enumerate(TURNS):
        _switch(model, adapter)
        losses.append([0.0] * ranks)
        for rank in range(ranks):
            for number in range(MICRO_BATCHES):
                loss = model(**micro_batch(step, rank, number)).loss
                (loss / (ranks * MICRO_BATCHES)).backward()
                losses[-1][rank] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return [[each[rank] for each in losses] for rank in range(ranks)]


def train(cases: list[tuple[int, dict[str, Any]]]) -> list[list[float]]:
    """Returns the losses of this rank by case, which is a ZeRO stage and a block, and by batch."""
    prepare_rank()
    ds_lgamp.install()
    return [_train(*case) for case in cases]


def _train(stage: int, block: dict[str, Any]) -> list[float]:
    model, losses = _model(), []
    with quiet():
        engine = deepspeed.initialize(model=model, optimizer=_optimizer(model), config=configuration(stage, block))[0]
    for step, adapter in enumerate(TURNS):
        _switch(model, adapter)
        losses.append(0.0)
        for number in range(MICRO_BATCHES):
            loss = engine(**micro_batch(step, dist.get_rank(), number)).loss
            engine.backward(loss)
            engine.step()
            losses[-1] += loss.item()
    return losses
