"""Mistakes of scripts with the engine of an nn.Sequential, and what stock DeepSpeed takes but would be lost here. The
functions run on ranks and return the errors."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_lgamp
from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.plain.model_state import whole_state
from ds_lgamp.integrations.user_script import finish_engines
from ds_lgamp.runtime.batch import ActionError
from testing.deepspeed_rank import prepare_rank
from tests.integrations.deepspeed.plain.sequential import Inputs, Loss, WithTargets, pairs, sequential
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, configuration, initialize


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return hidden


class Counting(WithTargets):
    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, target = super().forward(pair)
        return self.counter(hidden), target


def faults(pipeline_ranks: int) -> dict[str, str]:
    """Makes mistakes, each with an engine of its own. Returns the errors."""
    prepare_rank()
    ds_lgamp.install()
    errors: dict[str, str] = {}
    config = configuration(1, {"pipeline_ranks": pipeline_ranks})
    _build_wrongly(partial(note_failure, errors), config)
    _end_a_batch_wrongly(partial(note_failure, errors), config)
    return errors


def _build_wrongly(fails: Callable[..., None], config: dict[str, Any]) -> None:
    fails("plain module", initialize, WithTargets(), config)
    fails("without a loss", initialize, nn.Sequential(Inputs(), nn.Sequential(nn.Linear(4, 4))), config)
    fails("too many ranks", initialize, nn.Sequential(WithTargets()), config)
    fails("indivisible", initialize, sequential(), configuration(1, {"pipeline_ranks": 3}))
    fails("unlike replicas", initialize, sequential(), configuration(1, {"data_rank_speeds": [2, 1]}))

    deeper = nn.Sequential(Inputs(), *[WithTargets() for _ in range(2 + dist.get_rank())], Loss())
    fails("unlike models", initialize, deeper, config)
    model = sequential()
    model[1].linear.weight.data = model[4].linear.weight.data
    fails("shared memory", initialize, model, config)

    model = sequential()
    engine = initialize(model, config)
    fails("second engine", initialize, model, config)
    fails("named", lambda: engine(inputs=pairs(0, dist.get_rank(), 0)))


def _end_a_batch_wrongly(fails: Callable[..., None], config: dict[str, Any]) -> None:
    rank = dist.get_rank()

    def uneven() -> None:
        for number in range(MICRO_BATCHES):
            engine.set_gradient_accumulation_boundary(rank == 0 or number == MICRO_BATCHES - 1)
            engine(*pairs(0, rank, number))

    engine = initialize(sequential(), config)
    fails("uneven", uneven)

    def factors(growth: float) -> None:
        for number in range(MICRO_BATCHES):
            engine.backward(engine(*pairs(0, rank, number)) * (1 + number * growth))
            engine.step()

    engine = initialize(sequential(), config)
    fails("factors", factors, 1)
    engine = initialize(sequential(), config)
    fails("factors of a rank", factors, rank)
    engine = initialize(sequential(), config)
    fails("no number", factors, math.nan)
    engine = initialize(sequential(), config)
    fails("infinity on a rank", factors, math.inf if rank else 0)

    engine = initialize(sequential(), config)
    for number in range(MICRO_BATCHES):
        engine(*pairs(0, rank, number))
    fails("never a step", engine, *pairs(0, rank, 0))

    engine = initialize(sequential(), config)
    engine.set_gradient_accumulation_boundary(True)
    engine(*pairs(0, rank, 0))
    fails("no step", engine, *pairs(0, rank, 0))
    fails("no backward", engine.step)

    engine = initialize(sequential(), config)
    engine.set_gradient_accumulation_boundary(True)
    fails("nothing to step", engine.step)
    fails("step alone", lambda: engine.step() if rank else engine(*pairs(0, rank, 0)))

    engine = initialize(sequential(), config)
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(*pairs(0, rank, 0)))
    fails("state in a step", engine.step if rank else lambda: whole_state(engine))

    engine = initialize(sequential(), config)
    engine.set_gradient_accumulation_boundary(True)
    fails("ended", lambda: engine(*pairs(0, rank, 0)) if rank else finish_engines())

    engine = initialize(sequential(), config)
    engine.eval()
    fails("in evaluation", engine.backward, engine(*pairs(0, rank, 0)))

    counter = Counter()
    engine = initialize(nn.Sequential(Inputs(), Counting(counter), Counting(counter), Loss()), config)

    def count() -> None:
        for number in range(MICRO_BATCHES):
            engine.backward(engine(*pairs(0, rank, number)))
            engine.step()

    fails("shared count", count)

    engine = initialize(nn.Sequential(Inputs(), WithTargets(), Inputs()), configuration(1, {}))
    engine.set_gradient_accumulation_boundary(True)
    fails("no loss", lambda: engine(*pairs(0, rank, 0)), error=ActionError)


def lose_work(pipeline_ranks: int) -> dict[str, str]:
    """Does what stock DeepSpeed takes, and what would be lost here. Returns the errors."""
    prepare_rank()
    ds_lgamp.install()
    rank, errors = dist.get_rank(), {}
    config, fails = configuration(1, {"pipeline_ranks": pipeline_ranks}), partial(note_failure, errors)
    engine = initialize(sequential(), config)
    fails("batch size", engine.set_train_batch_size, 6)
    fails("no batch", engine.set_train_batch_size, 0)

    def reuse() -> None:
        inputs, targets = pairs(0, rank, 0)
        for number in range(MICRO_BATCHES):
            engine.backward(engine(inputs, targets))
            engine.step()
            inputs.copy_(pairs(0, rank, number + 1)[0])

    fails("reused tensor", reuse)

    def switch(change: Callable[[nn.Module], Any]) -> None:
        for number in range(MICRO_BATCHES):
            engine.backward(engine(*pairs(0, rank, number)))
            engine.step()
            change(engine.module[2])

    engine = initialize(sequential(), config)
    fails("mode", switch, nn.Module.eval)
    engine = initialize(sequential(), config)
    fails("frozen", switch, lambda module: module.requires_grad_(False))
    for what in ("engine", "optimizer", "model"):
        engine = initialize(sequential(), config)
        drops = {"engine": engine, "optimizer": engine.optimizer, "model": engine.module}[what]
        drops.zero_grad()
        loss = engine(*pairs(0, rank, 0))
        # No loss has a gradient yet.
        drops.zero_grad()
        engine.backward(loss)
        engine.step()
        fails(f"zero_grad of the {what}", drops.zero_grad)
    engine = initialize(sequential(), config)
    engine.backward(engine(*pairs(0, rank, 0)))
    engine.step()
    fails("gradient of inputs", lambda: engine(pairs(0, rank, 1)[0].requires_grad_(), pairs(0, rank, 1)[1]))

    def regularize(last: int) -> None:
        for number in range(MICRO_BATCHES):
            loss = engine(*pairs(0, rank, number))
            if number == last:
                loss = loss + sum(each.pow(2).sum() for each in engine.module.parameters() if each.numel())
            engine.backward(loss)
            engine.step()

    for last in range(MICRO_BATCHES):
        engine = initialize(sequential(), config)
        fails(f"own term {last}", regularize, last)
    return errors


def go_on_after_a_failure() -> dict[str, str]:
    """Catches what a batch raised, as scripts do that skip a batch without memory, and goes on. Returns the errors."""
    prepare_rank()
    ds_lgamp.install()
    errors: dict[str, str] = {}
    fails = partial(note_failure, errors, error=ActionError)
    engine = initialize(sequential(), configuration(1, {}, micro_batches=1))
    inputs, targets = pairs(0, 0, 0)
    fails("batch", engine, inputs[:, :-1], targets)
    fails("zero_grad", engine.optimizer.zero_grad)
    fails("call", engine, inputs, targets)
    fails("step", engine.step)
    return errors


def evaluate_badly(fails: bool) -> tuple[str, list[float]]:
    """Evaluates at stage 3, where layers may fail, and trains. Returns the type of the error, and losses."""
    prepare_rank()
    ds_lgamp.install()
    engine, kind, losses = initialize(sequential(), configuration(3, {"resident_chunks": 1})), "", []
    for step in range(2):
        for number in range(MICRO_BATCHES):
            inputs, targets = pairs(step, 0, number)
            if fails and number == 0:
                engine.eval()
                with pytest.raises(RuntimeError) as caught:
                    engine(inputs[:, :-1], targets)
                kind = type(caught.value).__name__
                losses.append(engine(inputs, targets).item())
                engine.train()
            loss = engine(inputs, targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return kind, losses


def note_failure(
    errors: dict[str, str], what: str, mistake: Any, *arguments: Any, error: type[Exception] = ConfigError
) -> None:
    """Enters what ``mistake(*arguments)`` raises."""
    with pytest.raises(error) as caught:
        mistake(*arguments)
    errors[what] = str(caught.value)
