"""Small models of linear layers that train on stock DeepSpeed and with a block."""

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import ds_lgamp
from ds_lgamp.integrations.deepspeed.model.module import over_pipeline
from testing.deepspeed_rank import quiet
from tests.integrations.deepspeed.models import seed

ONE_LAYER_PER_CHUNK = {"layers_per_chunk": 1, "placement": "modular"}


def mean_square(output, target):
    return ((output - target) ** 2).mean()


def build(specs, **options):
    with quiet():
        return PipelineModule(specs, num_stages=2, loss_fn=mean_square, seed_layers=True, seed_fn=seed, **options)


def engine_of(module, block, stage=3, optimizer=None, micro_batches=2, **settings):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": micro_batches,
        "zero_optimization": {"stage": stage if block is not None else 1},
        "zero_allow_untested_optimizer": block is None,
        **({} if block is None else {"ds_lgamp": block}),
        **settings,
    }
    ds_lgamp.install()
    if optimizer is None:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with quiet():
        return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def batches(count, width=6, rows=4, start=0):
    generator = torch.Generator().manual_seed(start)
    return iter([(torch.randn(rows, width, generator=generator), torch.zeros(rows, width)) for _ in range(count)])


def both(specs, steps=3, **options):
    """Trains fresh modules on stock DeepSpeed and with a block. Returns the losses of both."""
    runs = []
    for block in (None, ONE_LAYER_PER_CHUNK):
        engine = engine_of(build(specs()), block, **options)
        runs.append([engine.train_batch(batches(2, start=step)).item() for step in range(steps)])
    return runs


def whole_state(module):
    """Returns the state of all pipeline ranks, because layers may have moved."""
    own = {name: value.clone() for name, value in module.state_dict().items()}
    return {name: value for rank in over_pipeline(module, own) for name, value in rank.items()}


def linears(count=2):
    return [LayerSpec(nn.Linear, 6, 6) for _ in range(count)]
