"""The code of the ranks of test_tensor_access.py: reads and writes outside a step, and their refusals."""

from functools import partial

import deepspeed
import pytest
import torch
from deepspeed.runtime.pipe.engine import PipelineError
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_update_full_grad_vectorized,
)

import ds_lgamp
from testing.deepspeed_rank import quiet
from tests.integrations.deepspeed.engine.tensor_reading import (
    MOMENTUM,
    TRAINING,
    detached,
    engine_of,
    named,
    over_data_ranks,
    read,
    refusal,
)
from tests.integrations.deepspeed.models import MICRO_BATCHES, pipeline_module
from tests.integrations.deepspeed.running import batches


def seen(engine):
    """Returns shape, whether all elements are there, and status of every parameter: after a step, inside a block that
    gathers the missing ones, and after the block."""
    parameters = list(engine.module.parameters())
    moments = []

    def look():
        moments.append([(tuple(each.ds_shape), each.numel() == each.ds_numel, each.ds_status) for each in parameters])
        moments[-1] = [(shape, full, status == ZeroParamStatus.AVAILABLE) for shape, full, status in moments[-1]]

    look()
    missing = [each for each in parameters if hasattr(each, "ds_id") and each.ds_status != ZeroParamStatus.AVAILABLE]
    with deepspeed.zero.GatheredParameters(missing):
        look()
    look()
    state = engine.module.state_dict(prefix="model.", keep_vars=True)
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        f"model.{name}": tuple(parameter.ds_shape) for name, parameter in named(engine).items()
    }
    return moments


def changes_in_blocks(engine, stage):
    """Returns pairs of tensors that must be equal, by description."""
    parameters = named(engine)
    before = read(safe_get_full_fp32_param, engine)
    pairs = {}
    if stage == 3:
        with deepspeed.zero.GatheredParameters(parameters.values()), torch.no_grad():
            for parameter in parameters.values():
                parameter.add_(1.0)
        with deepspeed.zero.GatheredParameters(parameters.values()):
            pairs["dropped without a modifier"] = before, detached(parameters)
    with deepspeed.zero.GatheredParameters(parameters.values(), modifier_rank=0):
        for name, parameter in parameters.items():
            parameter.data = 3 * before[name]
    tripled = {name: 3 * value for name, value in before.items()}
    pairs["given another tensor in a block"] = tripled, read(safe_get_full_fp32_param, engine)
    with engine.module.full_parameters():
        engine.module.state_dict()
        pairs["complete after an inner block"] = tripled, detached(parameters)
    with deepspeed.zero.GatheredParameters(parameters.values(), modifier_rank=1):
        for name, parameter in parameters.items():
            safe_set_full_fp32_param(parameter, 2 * before[name])
        pairs["set in the block"] = {name: 2 * value for name, value in before.items()}, detached(parameters)
    with deepspeed.zero.GatheredParameters(parameters.values()):
        pairs["after the block"] = {name: 2 * value for name, value in before.items()}, detached(parameters)
    return pairs


def values_that_differ(engine):
    """Writes another value on each rank. Returns what the data-parallel ranks then see of every parameter, and its
    master weights."""
    parameters = named(engine)
    for parameter in parameters.values():
        safe_set_full_fp32_param(parameter, torch.full(parameter.ds_shape, float(engine.grid.data_parallel_id)))
    with deepspeed.zero.GatheredParameters(parameters.values()):
        return over_data_ranks(engine, detached(parameters)), read(safe_get_full_fp32_param, engine)


def outside_a_step(stage):
    engine = engine_of(2, stage)
    engine.train_batch(batches(0, engine))
    return {
        "seen": seen(engine),
        "blocks": changes_in_blocks(engine, stage),
        "differing": values_that_differ(engine),
        "parts": None if stage == 3 else refusal(lambda: read(safe_get_local_fp32_param, engine)),
    }


def refusals():
    """Returns the errors by case."""
    engine = engine_of(2, 3)
    parameters = list(engine.module.parameters())
    first = parameters[0]
    value = torch.zeros(first.ds_shape)
    refused = {
        "no state yet": refusal(lambda: safe_get_full_optimizer_state(first, MOMENTUM)),
        "no gradient": refusal(lambda: safe_get_full_grad(first)),
        "no gradient to set": refusal(lambda: safe_set_full_grad(first, value)),
        "no gradients to update": refusal(lambda: safe_update_full_grad_vectorized(parameters, lambda each, _: each)),
        "another size": refusal(lambda: safe_set_full_fp32_param(first, torch.zeros(1))),
    }
    engine.train_batch(batches(0, engine))
    refused["no gradient between two groups of micro-batches"] = gradient_in_the_loss()
    refused["no gradient after a step"] = refusal(lambda: safe_get_full_grad(first))
    # Tries every parameter, because some have no elements on this rank.
    for parameter in parameters:
        zeros = torch.zeros(parameter.ds_shape)
        refused["another name"] = refusal(partial(safe_set_full_optimizer_state, parameter, zeros, "exp_avg"))
    with deepspeed.zero.GatheredParameters(first):
        part = safe_get_local_fp32_param(first)
        refused["a part inside a block"] = refusal(lambda: safe_set_local_fp32_param(first, part))
        refused["a step inside a block"] = refusal(lambda: engine.train_batch(batches(1, engine)))
        engine.eval_batch(batches(1, engine))
        assert first.numel() == first.ds_numel
    assert first.numel() == 0
    for call in (engine.forward, engine.backward, engine.step):
        with pytest.raises(PipelineError, match="Only train_batch"):
            call()
    engine.zero_grad()
    engine.train_batch(batches(1, engine))
    return refused


def gradient_in_the_loss():
    """Returns the error of reading a gradient in the loss of a second group of micro-batches."""
    engine = engine_of(2, 3, block={"micro_batch_group": 2})
    loss_fn, refused = engine.module.loss_fn, []

    def reading_loss(outputs, labels):
        refused.append(refusal(lambda: safe_get_full_grad(parameter)))
        return loss_fn(outputs, labels)

    engine.module.loss_fn = reading_loss
    parameter = next(reversed(list(engine.module.parameters())))
    engine.train_batch(batches(0, engine))
    return refused[-1] if refused else refusal(lambda: safe_get_full_grad(parameter))


def parameters_without_optimizer():
    """Returns the value that is read of a frozen parameter, the error of a write to it, and its values after a block
    that changed it."""
    ds_lgamp.install()
    with quiet():
        module = pipeline_module(TRAINING, 2)
        parameters = dict(module.named_parameters())
        for name, parameter in parameters.items():
            parameter.requires_grad_(name.endswith("bias") or "tied" in name)
        config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": MICRO_BATCHES, "ds_lgamp": {}}
        config["zero_optimization"] = {"stage": 3}
        owned = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(owned, lr=0.1)
        engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    frozen = next(parameter for parameter in engine.module.parameters() if not parameter.requires_grad)
    with deepspeed.zero.GatheredParameters(frozen, modifier_rank=0), torch.no_grad():
        frozen.fill_(0.5 if engine.grid.data_parallel_id == 0 else 7.0)
    engine.train_batch(batches(0, engine))
    with deepspeed.zero.GatheredParameters(frozen):
        values = frozen.detach().clone()
    return (
        safe_get_full_fp32_param(frozen),
        refusal(lambda: safe_set_full_fp32_param(frozen, torch.zeros(frozen.ds_shape))),
        values,
    )
