"""What scripts do with the engine of an nn.Sequential. The functions run on ranks and return what they saw."""

import time
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate.state import GradientState
from deepspeed.accelerator import get_accelerator
from torch import nn

import ds_lgamp
from ds_lgamp.integrations.deepspeed.plain.model_state import whole_state
from ds_lgamp.integrations.user_script import finish_engines
from testing.deepspeed_rank import prepare_rank, quiet
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, RATE, configuration, initialize


def sequential() -> nn.Sequential:
    """Makes a model that computes its own loss."""
    torch.manual_seed(3)
    return nn.Sequential(Inputs(), *[WithTargets() for _ in range(4)], Loss())


class Inputs(nn.Module):
    """Takes inputs and targets. The targets travel with the hidden states."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return pair


class WithTargets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(pair[0]).tanh(), pair[1]


class Loss(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(*pair)


def pairs(step: int, rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 100 * rank + number)
    return torch.randn(2, 6, generator=generator), torch.randn(2, 6, generator=generator)


def step(engine: Any, number: int = 0, **options: Any) -> None:
    """Trains one step of the script, the one of this ``number``."""
    for micro_batch in range(MICRO_BATCHES):
        engine.backward(engine(*pairs(number, dist.get_rank(), micro_batch)))
        engine.step(**options)


def train_sequential(pipeline_ranks: int, factor: float, through_engine: bool) -> list[float]:
    """Trains an nn.Sequential, with a loss that the script multiplies. Returns the sums of its losses by step.

    Args:
        through_engine: whether it calls ``engine.backward(loss)`` rather than ``loss.backward()``.
    """
    prepare_rank()
    ds_lgamp.install()
    engine = initialize(sequential(), configuration(2, {"pipeline_ranks": pipeline_ranks}))
    sums = []
    for turn in range(3):
        sums.append(0.0)
        for number in range(MICRO_BATCHES):
            loss = engine(*pairs(turn, dist.get_rank(), number))
            sums[-1] += loss.item()
            # In place, as the Trainer does.
            loss *= factor
            (engine.backward if through_engine else torch.Tensor.backward)(loss)
            engine.step()
    return sums


def train_upper_layers(pipeline_ranks: int, with_inputs: bool) -> tuple[int, list[float], list[float]]:
    """Trains an nn.Sequential of which only the last two linear layers are not frozen.

    Args:
        with_inputs: whether the script asks for gradients of its inputs.

    Returns the chunks without a backward, the first trained weight, which only rank 0 gets, and the gradient of the
    first input.
    """
    prepare_rank()
    ds_lgamp.install()
    model = sequential()
    model[:3].requires_grad_(False)
    engine = initialize(model, configuration(3, {"pipeline_ranks": pipeline_ranks, "layers_per_chunk": 1}))
    inputs = []
    for number in range(MICRO_BATCHES):
        given, target = pairs(0, dist.get_rank(), number)
        inputs.append(given.requires_grad_(with_inputs))
        engine.backward(engine(given, target))
        engine.step()
    gradient = inputs[0].grad.flatten().tolist() if with_inputs else []
    weight = whole_state(engine).get("3.linear.weight", torch.empty(0))
    return engine.program_spec.first_trained, weight.flatten().tolist(), gradient


def train_beside_stock_engines(pipeline_ranks: int) -> list[list[float]]:
    """Trains models on stock engines that are built ahead of an engine with a block and behind it. Returns the weights
    of each after a step."""
    prepare_rank()
    ds_lgamp.install()
    models = [sequential() for _ in range(3)]
    blocks = [{"enabled": False}, {"pipeline_ranks": pipeline_ranks}, {"enabled": False}]
    engines = [initialize(model, configuration(0, block)) for model, block in zip(models, blocks)]
    for number in range(MICRO_BATCHES):
        for engine in engines:
            engine.backward(engine(pairs(0, dist.get_rank(), number)))
            engine.step()
    return [model[1].linear.weight.flatten().tolist() for model in models[::2]]


def step_on_a_plateau(pipeline_ranks: int) -> list[float]:
    """Gives the scheduler what the script has measured. Returns the learning rates, by step."""
    prepare_rank()
    ds_lgamp.install()
    # What a loader of Accelerate makes, whoever iterates over it. The script completes batches as DeepSpeed counts.
    GradientState()
    model = sequential()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    with quiet():
        engine = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            config=configuration(1, {"pipeline_ranks": pipeline_ranks}),
        )[0]
    rates = []
    for number, measured in enumerate((3.0, 2.0, 2.0, 1.0)):
        step(engine, number, lr_kwargs={"metrics": measured})
        rates.append(engine.get_lr()[0])
    return rates


def train_on_cast_inputs(pipeline_ranks: int) -> list[str]:
    """Returns the data types in which the first module sees fp32 inputs under ``fp16.auto_cast``."""
    prepare_rank()
    ds_lgamp.install()
    # Every CPU computes in fp16; some do so slowly, and DeepSpeed leaves it out there.
    get_accelerator().is_fp16_supported = lambda: True
    model, seen = sequential(), []
    model[0].register_forward_pre_hook(lambda _, given: seen.extend(str(each.dtype) for each in given[0]))
    config = configuration(1, {"pipeline_ranks": pipeline_ranks})
    engine = initialize(model, {**config, "fp16": {"enabled": True, "auto_cast": True, "loss_scale": 1.0}})
    step(engine)
    return sorted(set(seen))


def train_without_sync(pipeline_ranks: int) -> list[float]:
    """Accumulates in ``no_sync``, as a script does that sets gradient_accumulation_steps to 1. Returns the norms of
    the gradients by step."""
    prepare_rank()
    ds_lgamp.install()
    config = configuration(1, {"pipeline_ranks": pipeline_ranks}, micro_batches=1)
    engine = initialize(sequential(), config)
    norms = []
    for number in range(2):
        with engine.no_sync():
            engine.backward(engine(*pairs(number, dist.get_rank(), 0)))
        engine.backward(engine(*pairs(number, dist.get_rank(), 1)))
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


def train_on_own_data(pipeline_ranks: int) -> list[Any]:
    """Returns the samples that the engine's own loader gives to this rank."""
    prepare_rank()
    ds_lgamp.install()
    model = sequential()
    data = [(torch.full((6,), float(index)), torch.zeros(6)) for index in range(16)]
    with quiet():
        engine, _, loader, _ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
            config=configuration(1, {"pipeline_ranks": pipeline_ranks}),
            training_data=data,
        )
    seen = []
    for inputs, targets in loader:
        engine.backward(engine(inputs, targets))
        engine.step()
        seen.append(inputs[:, 0].tolist())
    return [*seen, engine.global_steps]


def work_alone_after_training(seconds: float) -> None:
    """Rank 0 works for ``seconds``, twice as long as the process group waits, while rank 1 has ended its script."""
    prepare_rank()
    ds_lgamp.install()
    engine = initialize(sequential(), configuration(1, {"pipeline_ranks": 2}))
    step(engine)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds / 2))
    if dist.get_rank() == 0:
        time.sleep(seconds)
    finish_engines()
