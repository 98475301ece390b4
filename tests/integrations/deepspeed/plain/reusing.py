"""Loops that reuse what they give the engine, or set something on the model between two calls. The functions run on
ranks."""

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import ds_lgamp
from ds_lgamp.config import ConfigError
from testing.deepspeed_rank import prepare_rank
from tests.integrations.deepspeed.plain import imported_late
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, RATE, configuration, initialize
from tests.integrations.split.own_models import VOCABULARY, WIDTH, Attention, cross_entropy, micro_batch

SETTINGS = {"scale": 1.0}
HELD = {"scale": 1.0}


class Options(dict[str, float]):
    """A dictionary of a script's own."""


OPTIONS = Options(scale=1.0)


class Schedule:
    """What forwards do not name themselves."""

    __slots__ = "__now"

    def __init__(self) -> None:
        self.set(1.0)

    def set(self, now: float) -> None:
        self.__now = now

    def read(self) -> float:
        return self.__now


SCHEDULE = Schedule()


def _helped(state: dict[str, float] = HELD) -> float:
    from tests.integrations.deepspeed.plain import imported_late

    return state["scale"] * OPTIONS["scale"] * SCHEDULE.read() * imported_late.FACTOR


class Gpt(nn.Module):
    """Takes tokens and labels from a container, and has settings that scripts change. Counts its calls."""

    dummy_inputs = {"batch": {"tokens": torch.zeros(1, 4, dtype=torch.long), "labels": torch.zeros(1, 4).long()}}

    of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Attention(causal=True) for _ in range(3))
        self.dropout, self.temperature, self.config = nn.Dropout(0.0), 1.0, SimpleNamespace(scale=1.0)
        self.calls, self.counted, self.table, self.activation = 0, 1, {"scale": 1.0}, torch.tanh
        self.nested = {"of": [SimpleNamespace(depth=1.0)]}
        self.register_buffer("filled", torch.ones(()))

    def forward(self, batch: Any) -> Tensor:
        self.calls += self.counted
        tokens, labels = _read(batch)
        hidden = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            hidden = block(hidden)
        factor = self.temperature * self.config.scale * self.table["scale"] * SETTINGS["scale"] * self.of_class
        return cross_entropy(self.head(hidden), labels) * factor * self.filled * self._more()

    def _more(self) -> float:
        return _helped() * self.nested["of"][0].depth


def _read(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, dict):
        return batch["tokens"], batch["labels"]
    return (batch[0], batch[1]) if isinstance(batch, list) else (batch.tokens, batch.labels)


class Batch:
    """A class of the script's own."""


def _refill(container: Any, tokens: Tensor, labels: Tensor) -> Any:
    """Puts a micro-batch into the same container as every other one."""
    if isinstance(container, dict):
        container.update(tokens=tokens, labels=labels)
    elif isinstance(container, list):
        container[:] = tokens, labels
    else:
        container.tokens, container.labels = tokens, labels
    return container


CONTAINERS = {"a dictionary": dict, "a list": list, "a namespace": SimpleNamespace}


def _begun(block: dict[str, Any]) -> Any:
    prepare_rank()
    ds_lgamp.install()
    SETTINGS["scale"] = HELD["scale"] = OPTIONS["scale"] = Gpt.of_class = imported_late.FACTOR = 1.0
    SCHEDULE.set(1.0)
    torch.manual_seed(0)
    return initialize(Gpt(), configuration(3, block))


def train_from_one_container(block: dict[str, Any]) -> dict[str, float]:
    """Trains a step from one container of each kind. Returns the sums of the losses."""
    return {kind: _train_from(kind, block) for kind in CONTAINERS}


def _train_from(kind: str, block: dict[str, Any]) -> float:
    engine, container, total = _begun(block), CONTAINERS[kind](), 0.0
    for number in range(MICRO_BATCHES):
        loss = engine(_refill(container, *micro_batch("", dist.get_rank(), number)))
        engine.backward(loss)
        engine.step()
        total += loss.item()
    return total


def alone(ranks: int) -> list[float]:
    """Returns the sums of the losses of all ranks, of one process."""
    torch.manual_seed(0)
    model = Gpt()
    batches = [
        [dict(zip(("tokens", "labels"), micro_batch("", rank, number))) for number in range(MICRO_BATCHES)]
        for rank in range(ranks)
    ]
    return [sum(model(each).item() for each in own) for own in batches]


CHANGES = {
    "temperature": lambda model: setattr(model, "temperature", 2.0),
    "p": lambda model: setattr(model.dropout, "p", 0.5),
    "scale": lambda model: setattr(model.config, "scale", 2.0),
    "new": lambda model: setattr(model, "new", 1),
    "table": lambda model: model.table.update(scale=2.0),
    "filled": lambda model: model.filled.fill_(2.0),
    "activation": lambda model: setattr(model, "activation", torch.relu),
    "SETTINGS": lambda _: SETTINGS.update(scale=2.0),
    "of_class": lambda _: setattr(Gpt, "of_class", 2.0),
    "state": lambda _: HELD.update(scale=2.0),
    "OPTIONS": lambda _: OPTIONS.update(scale=2.0),
    "_Schedule__now": lambda _: SCHEDULE.set(2.0),
    "FACTOR": lambda _: setattr(imported_late, "FACTOR", 2.0),
    "depth": lambda model: setattr(model.nested["of"][0], "depth", 2.0),
    "hook": lambda model: model.register_forward_hook(lambda _, __, loss: loss * 2.0),
    "out": lambda model: setattr(model.blocks[0], "out", nn.Identity()),
    "object": lambda model: None,
}


def change_between_calls(block: dict[str, Any], changes: list[str]) -> dict[str, tuple[str, float]]:
    """Makes ``changes`` between two calls of a batch, one after another. Returns the errors, and the losses of batches
    in which it was changed ahead of the first call."""
    return {change: _change(change, block) for change in changes}


def _change(change: str, block: dict[str, Any]) -> tuple[str, float]:
    engine, given = _begun(block), Batch()
    error = ""
    try:
        for number in range(MICRO_BATCHES):
            tokens = micro_batch("", dist.get_rank(), number)
            loss = engine(_refill(given if change == "object" else {}, *tokens))
            engine.backward(loss)
            engine.step()
            CHANGES[change](engine.module)
    except ConfigError as refusal:
        error = str(refusal)
    engine = _begun(block)
    CHANGES[change](engine.module)
    total = 0.0
    for number in range(MICRO_BATCHES):
        loss = engine(_refill({}, *micro_batch("", dist.get_rank(), number)))
        engine.backward(loss)
        engine.step()
        total += loss.item()
    return error, total


class Averaging(nn.Module):
    """A block that subtracts a mean, which its forwards in training move if it ``moves``."""

    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.inner, self.moves = Attention(causal=True), moves
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training and self.moves:
            self.mean.lerp_(hidden.detach().mean((0, 1)), 0.5)
        return self.inner(hidden) - self.mean


def _averaging(moves: bool) -> Gpt:
    torch.manual_seed(0)
    model = Gpt()
    model.blocks[2], model.counted = Averaging(moves), 0
    return model


def _evaluated_after(call: int, model: nn.Module, train: Any, tokens: list[Any]) -> float:
    """Gives ``train`` each micro-batch, and evaluates the ``model`` after one call. Returns its loss."""
    found = math.nan
    for number, each in enumerate(tokens):
        model.train()
        train(each)
        if number == call:
            model.eval()
            with torch.no_grad():
                found = model(tokens[0]).item()
    return found


def evaluate_inside_batches(block: dict[str, Any], moves: bool) -> tuple[float, list[float | str]]:
    """Evaluates a model after each of the calls of a batch and after the one of the last batch. Returns what the model
    alone has after the first call, and what the engine has after each, or the error."""
    prepare_rank()
    ds_lgamp.install()
    rank, found = dist.get_rank(), []
    tokens = [dict(zip(("tokens", "labels"), micro_batch("", rank, number))) for number in range(MICRO_BATCHES)]
    whole = [dict(zip(("tokens", "labels"), micro_batch("", other, 0))) for other in range(dist.get_world_size())]
    plain = _averaging(moves)
    for each in whole:
        plain(each)
    plain.eval()
    for call in range(MICRO_BATCHES):
        engine = initialize(_averaging(moves), configuration(3, block))

        def train(each: Any, engine: Any = engine) -> None:
            engine.backward(engine(each))
            engine.step()

        try:
            found.append(_evaluated_after(call, engine, train, tokens))
        except ConfigError as refusal:
            found.append(str(refusal))
    return plain(tokens[0]).item(), found


READINGS = {
    "the engine": lambda engine, batch: engine(batch),
    "the model": lambda engine, batch: engine.module(batch),
    "the state": lambda engine, _: engine.module.state_dict(),
}


def read_at_different_places(stage: int, block: dict[str, Any], moves: bool) -> dict[str, str]:
    """Reads from a model in each way, on rank 0 ahead of a batch of two calls, on rank 1 inside it. Returns the
    errors."""
    prepare_rank()
    ds_lgamp.install()
    rank, found = dist.get_rank(), {}
    tokens = [dict(zip(("tokens", "labels"), micro_batch("", rank, number))) for number in range(MICRO_BATCHES)]
    for name, read in READINGS.items():
        engine, found[name] = initialize(_averaging(moves), configuration(stage, block)), ""
        try:
            for number, each in enumerate(tokens):
                if number == rank:
                    engine.eval()
                    with torch.no_grad():
                        read(engine, tokens[0])
                engine.train()
                engine.backward(engine(each))
                engine.step()
        except ConfigError as refusal:
            found[name] = str(refusal)
    return found


class Copying(nn.Module):
    """A block that computes with a rounded copy of its weight, and makes it anew when torch has counted a change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.copied, self.version = nn.Linear(WIDTH, WIDTH), torch.zeros(()), -1

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self.linear.weight
        if self.version != weight._version:
            self.copied, self.version = weight.detach().bfloat16().float(), weight._version
        return hidden + functional.linear(hidden, weight + (self.copied - weight).detach())


def _copying() -> Gpt:
    torch.manual_seed(0)
    model = Gpt()
    model.blocks[2], model.counted = Copying(), 0
    return model


def _batch(number: int) -> dict[str, Tensor]:
    return dict(zip(("tokens", "labels"), micro_batch("", 0, number)))


def copies_alone(steps: int) -> list[float]:
    """Returns the sum of the losses of each step, of one process."""
    model, losses = _copying(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(steps):
        found = [model(_batch(number)) for number in range(MICRO_BATCHES)]
        (sum(found) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(each.item() for each in found))
    return losses


def train_copies(steps: int, stages: list[int]) -> list[list[float]]:
    """Returns the same of the engine at each stage."""
    prepare_rank()
    ds_lgamp.install()
    return [_train_copies(steps, stage) for stage in stages]


def _train_copies(steps: int, stage: int) -> list[float]:
    engine, losses = initialize(_copying(), configuration(stage, {"layers_per_chunk": 1})), []
    for _ in range(steps):
        total = 0.0
        for number in range(MICRO_BATCHES):
            loss = engine(_batch(number))
            engine.backward(loss)
            engine.step()
            total += loss.item()
        losses.append(total)
    return losses
