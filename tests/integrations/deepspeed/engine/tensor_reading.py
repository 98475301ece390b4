"""An engine for tests that read and write its tensors, and functions that read them."""

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_lgamp
from ds_lgamp.config import ConfigError
from testing.deepspeed_rank import quiet
from tests.integrations.deepspeed.models import MICRO_BATCHES, Training, decay_groups, pipeline_module, scaled_weights

TRAINING = Training(blocks=6, tied=True, momentum=0.9, clipping=0.5)
FP32, BF16 = {}, {"bf16": {"enabled": True}}
MOMENTUM = "momentum_buffer"


def engine_of(pipeline_ranks, stage, precision=FP32, clipping=TRAINING.clipping, block=None, hook=None, zero=None):
    """Builds an engine. The user's optimizer calls ``hook`` after its steps. ``zero`` has more keys of
    zero_optimization."""
    ds_lgamp.install()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": clipping,
        "zero_optimization": {"stage": stage, **(zero or {})},
        "ds_lgamp": block or {},
        **precision,
    }
    with quiet():
        module = pipeline_module(TRAINING, pipeline_ranks)
        scaled_weights(module.named_parameters())
        groups = decay_groups(module.parameters(), TRAINING.decay)
        optimizer = torch.optim.SGD(groups, lr=TRAINING.learning_rate, momentum=TRAINING.momentum)
        if hook is not None:
            optimizer.register_step_post_hook(hook)
        return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def named(engine):
    return dict(engine.module.named_parameters())


def read(get, engine, *arguments):
    return {name: get(parameter, *arguments).clone() for name, parameter in named(engine).items()}


def detached(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def before_step(engine, function):
    """Calls ``function`` when the gradients of the next step are final."""
    step = engine.optimizer.step

    def wrapped():
        engine.optimizer.step = step
        function()
        step()

    engine.optimizer.step = wrapped


def over_data_ranks(engine, tensor):
    everyone = [None] * engine.dp_world_size
    dist.all_gather_object(everyone, tensor, group=engine.data_parallel_group)
    return everyone


def refusal(call):
    """Returns the error of ``call``."""
    with pytest.raises(ConfigError) as refused:
        call()
    return str(refused.value)
