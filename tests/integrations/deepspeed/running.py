"""Trains the test model through ``deepspeed.initialize`` on the ranks of a test."""

from typing import NamedTuple

import deepspeed
import torch

import ds_lgamp
from testing.deepspeed_rank import quiet
from tests.integrations.deepspeed.models import (
    MICRO_BATCHES,
    Training,
    decay_groups,
    pipeline_module,
    scaled_weights,
    warmup_factors,
)
from tests.runtime.assembly import gathered
from tests.runtime.models import micro_batch


class Layout(NamedTuple):
    """The layout, block and optimizer of a training."""

    pipeline_ranks: int
    data_ranks: int
    stage: int
    block: dict | None
    """The ds_lgamp block; None for stock DeepSpeed."""
    optimizer: str = "client"
    """client: the user's object; callable: a function that makes one; json: named in the configuration."""
    zero: dict = {}
    """More keys of zero_optimization."""


class Run(NamedTuple):
    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, torch.Tensor]]
    parameters: dict[str, torch.Tensor]
    evaluation: float
    engine: object


def json_config(training: Training, layout: Layout) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": training.clipping,
        "zero_optimization": {"stage": layout.stage, **layout.zero},
        "zero_allow_untested_optimizer": True,
    }
    if layout.block is not None:
        config["ds_lgamp"] = layout.block
    if layout.optimizer == "json":
        options = {"lr": training.learning_rate, "momentum": training.momentum}
        config["optimizer"] = {"type": "SGD", "params": options}
    return config


def initialize(training: Training, layout: Layout, **config):
    """Makes the engine as an ordinary script does, with more keys of ``config``."""
    ds_lgamp.install()
    with quiet():
        module = pipeline_module(training, layout.pipeline_ranks)
        scaled_weights(module.named_parameters())
        groups = decay_groups(module.parameters(), training.decay)
        options = {"lr": training.learning_rate, "momentum": training.momentum}
        arguments = {"model_parameters": groups}
        if layout.optimizer == "client":
            optimizer = torch.optim.SGD(groups, **options)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_factors(training.warmup))
            arguments = {"optimizer": optimizer, "lr_scheduler": scheduler}
        else:
            arguments["lr_scheduler"] = lambda made: torch.optim.lr_scheduler.LambdaLR(
                # Some optimizers divide the groups.
                made,
                warmup_factors(training.warmup)[:1] * len(made.param_groups),
            )
            if layout.optimizer == "callable":
                arguments["optimizer"] = lambda parameters: torch.optim.SGD(parameters, **options)
        engine, *_ = deepspeed.initialize(model=module, config=json_config(training, layout) | config, **arguments)
    assert engine.module is module
    return engine


def batches(step: int, engine, training: bool = True):
    """The micro-batches of this data-parallel rank. In training, those of a block may have unequal numbers of them."""
    rank, shares = engine.grid.data_parallel_id, [MICRO_BATCHES] * engine.dp_world_size
    if training and hasattr(engine, "lgamp"):
        shares = [replica.micro_batches for replica in engine.lgamp.replica_specs]
    first = sum(shares[:rank])
    return iter([micro_batch(step, first + index) for index in range(shares[rank])])


def train(training: Training, layout: Layout) -> Run:
    """Trains. Gradients are those before clipping, parameters those after the last step, of this rank's layers."""
    engine = initialize(training, layout)
    run = Run([], [], [], {}, 0.0, engine)
    partition = getattr(engine.optimizer, "partition", None)
    if partition is not None:
        step_optimizer = engine.optimizer.step

        def recording_step():
            run.gradients.append(gathered(partition, lambda unit: unit.reduction.shard_gradient))
            step_optimizer()

        engine.optimizer.step = recording_step
    for step in range(training.steps):
        run.losses.append(engine.train_batch(batches(step, engine)).item())
        norm = engine.get_global_grad_norm()
        run.norms.append(float("nan") if norm is None else float(norm))
    evaluation = engine.eval_batch(batches(99, engine, training=False)).item()
    parameters = {} if partition is None else gathered(partition, lambda unit: unit.storage.shard)
    return run._replace(evaluation=evaluation, parameters=parameters)
