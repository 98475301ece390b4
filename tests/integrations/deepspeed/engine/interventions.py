"""The code of the ranks of test_tensor_access.py: trainings in which user code reads and writes tensors."""

from itertools import product

import deepspeed
import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)

from ds_lgamp.checkpoint.files import CheckpointError
from testing.deepspeed_rank import prepare_rank
from tests.integrations.deepspeed.engine.outside_a_step import outside_a_step, parameters_without_optimizer, refusals
from tests.integrations.deepspeed.engine.tensor_reading import (
    BF16,
    FP32,
    MOMENTUM,
    TRAINING,
    before_step,
    detached,
    engine_of,
    named,
    over_data_ranks,
    read,
)
from tests.integrations.deepspeed.models import MICRO_BATCHES, build_layers, decay_groups, loss_of
from tests.integrations.deepspeed.running import batches

# One training with every kind of intervention, on one process and on an engine.


def changed_gradient(gradient):
    return -gradient if gradient.dim() > 1 else 3 * gradient


def changed_weights(weights):
    return 0.9 * weights + 0.01


def changed_momentum(momentum):
    return 0.5 * momentum


def change_in_place(weights):
    weights.mul_(1.1)


def intervene_on_one_process(data_ranks):
    layers, parameters = build_layers(TRAINING)
    groups = decay_groups(parameters.values(), TRAINING.decay)
    optimizer = torch.optim.SGD(groups, lr=TRAINING.learning_rate, momentum=TRAINING.momentum)
    count = MICRO_BATCHES * data_ranks
    record = {"losses": []}

    def train(step):
        losses = [loss_of(layers, step, index) / count for index in range(count)]
        for loss in losses:
            loss.backward()
        record["losses"].append(sum(loss.item() for loss in losses))
        if step == 1:
            record["gradients"] = detached({name: parameter.grad for name, parameter in parameters.items()})
            for parameter in parameters.values():
                parameter.grad = changed_gradient(parameter.grad)
        torch.nn.utils.clip_grad_norm_(parameters.values(), TRAINING.clipping)
        optimizer.step()
        optimizer.zero_grad()

    train(0)
    train(1)
    record["weights"] = detached(parameters)
    record["momentum"] = detached({name: optimizer.state[each][MOMENTUM] for name, each in parameters.items()})
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(changed_weights(parameter))
            optimizer.state[parameter][MOMENTUM] = changed_momentum(optimizer.state[parameter][MOMENTUM])
    train(2)
    record["inside"] = detached(parameters)
    with torch.no_grad():
        for parameter in parameters.values():
            change_in_place(parameter)
    record["after"] = detached(parameters)
    train(3)
    record["end"] = detached(parameters)
    return record


def intervene(pipeline_ranks, stage, zero=None, block=None):
    engine = engine_of(pipeline_ranks, stage, block=block, zero=zero)
    parameters = list(engine.module.parameters())
    record = {"losses": []}

    def train(step):
        record["losses"].append(engine.train_batch(batches(step, engine)).item())

    def change_gradients():
        record["gradients"] = read(safe_get_full_grad, engine)
        matrices = [parameter for parameter in parameters if len(parameter.ds_shape) > 1]
        safe_update_full_grad_vectorized(matrices, lambda gradient, _: changed_gradient(gradient))
        for parameter in parameters:
            if len(parameter.ds_shape) == 1:
                safe_set_full_grad(parameter, changed_gradient(safe_get_full_grad(parameter)))

    train(0)
    before_step(engine, change_gradients)
    train(1)
    record["weights"] = read(safe_get_full_fp32_param, engine)
    record["momentum"] = read(safe_get_full_optimizer_state, engine, MOMENTUM)
    for name, parameter in named(engine).items():
        safe_set_full_fp32_param(parameter, changed_weights(record["weights"][name]))
        safe_set_full_optimizer_state(parameter, changed_momentum(record["momentum"][name]), MOMENTUM)
    train(2)
    modifier = engine.dp_world_size - 1
    with deepspeed.zero.GatheredParameters(engine.module.parameters(), modifier_rank=modifier):
        record["inside"] = detached(named(engine))
        if engine.grid.data_parallel_id == modifier:
            with torch.no_grad():
                for parameter in parameters:
                    change_in_place(parameter)
    with deepspeed.zero.GatheredParameters(parameters):
        record["after"] = detached(named(engine))
    train(3)
    record["end"] = read(safe_get_full_fp32_param, engine)
    return record


# The same in bf16. Master weights and weights match to the bit.


def half_precision(pipeline_ranks, stage, zero=None):
    """Returns pairs of tensors that must be equal, by description."""
    engine = engine_of(pipeline_ranks, stage, BF16, clipping=0, zero=zero)
    parameters = named(engine)
    for step in range(2):
        engine.train_batch(batches(step, engine))
    generator = torch.Generator().manual_seed(0)
    written = {name: torch.randn(each.ds_shape, generator=generator) for name, each in parameters.items()}
    momentum = {name: torch.randn(each.ds_shape, generator=generator) for name, each in parameters.items()}
    for name, parameter in parameters.items():
        safe_set_full_fp32_param(parameter, written[name])
        safe_set_full_optimizer_state(parameter, momentum[name], MOMENTUM)
    pairs = {"master weights read": (read(safe_get_full_fp32_param, engine), written)}
    with deepspeed.zero.GatheredParameters(parameters.values(), modifier_rank=0):
        working = detached(parameters)
    pairs["weights read"] = working, {name: value.bfloat16() for name, value in written.items()}
    pairs["state read"] = read(safe_get_full_optimizer_state, engine, MOMENTUM), momentum
    pairs["master weights after a block that changed nothing"] = read(safe_get_full_fp32_param, engine), written
    gradients = {}
    before_step(engine, lambda: gradients.update(read(safe_get_full_grad, engine)))
    engine.train_batch(batches(2, engine))
    expected = {
        name: written[name] - TRAINING.learning_rate * (TRAINING.momentum * momentum[name] + gradients[name])
        for name in parameters
    }
    stepped = read(safe_get_full_fp32_param, engine)
    pairs["the next step"] = stepped, expected
    with deepspeed.zero.GatheredParameters(parameters.values(), modifier_rank=0), torch.no_grad():
        if engine.grid.data_parallel_id == 0:
            for parameter in parameters.values():
                parameter.view(-1)[0] = 2.0
    one_changed = {name: value.clone() for name, value in stepped.items()}
    for value in one_changed.values():
        value.view(-1)[0] = 2.0
    pairs["one element changed in a block"] = read(safe_get_full_fp32_param, engine), one_changed
    with deepspeed.zero.GatheredParameters(parameters.values()), torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(0.75)
        engine.optimizer.refresh_fp32_params()
    refreshed = {name: torch.full_like(value, 0.75) for name, value in written.items()}
    pairs["master weights refreshed in a block"] = read(safe_get_full_fp32_param, engine), refreshed
    for name, parameter in parameters.items():
        safe_set_full_fp32_param(parameter, written[name])
    engine.optimizer.refresh_fp32_params()
    rounded = {name: value.bfloat16().float() for name, value in written.items()}
    pairs["master weights refreshed"] = read(safe_get_full_fp32_param, engine), rounded
    return pairs


def this_ranks_part():
    """Returns, at stage 3, tensors from the functions for parts, joined over the data-parallel ranks, beside the whole
    tensors."""
    engine = engine_of(2, 3)
    engine.train_batch(batches(0, engine))
    pairs = {}

    def joined(parts):
        return {name: torch.cat(over_data_ranks(engine, part)) for name, part in parts.items()}

    def flat(tensors):
        return {name: tensor.flatten() for name, tensor in tensors.items()}

    def doubled(what, get, put, whole, *key):
        before = read(whole, engine, *key)
        pairs[f"{what} read"] = joined(read(get, engine, *key)), flat(before)
        for parameter in engine.module.parameters():
            put(parameter, 2 * get(parameter, *key), *key)
        pairs[f"{what} written"] = read(whole, engine, *key), {name: 2 * value for name, value in before.items()}

    doubled("weights", safe_get_local_fp32_param, safe_set_local_fp32_param, safe_get_full_fp32_param)
    doubled(
        "state",
        safe_get_local_optimizer_state,
        safe_set_local_optimizer_state,
        safe_get_full_optimizer_state,
        MOMENTUM,
    )
    before_step(engine, lambda: doubled("gradient", safe_get_local_grad, safe_set_local_grad, safe_get_full_grad))
    engine.train_batch(batches(1, engine))
    return pairs


# The optimizer's state_dict.


def optimizer_state(stage, precision):
    """Returns losses and weights after a state was taken and after each load of it, and the errors of states that do
    not fit."""
    engine = engine_of(2, stage, precision)
    engine.train_batch(batches(0, engine))
    state, ends = engine.optimizer.state_dict(), []
    for _ in range(3):
        loss = engine.train_batch(batches(1, engine)).item()
        ends.append((loss, read(safe_get_full_fp32_param, engine)))
        engine.optimizer.load_state_dict(state)
    shorter = {name: {**saved, "master": saved["master"][1:]} for name, saved in state["partition"].items()}
    unfit = {
        "another rank's": over_data_ranks(engine, state)[1],
        "no state": {},
        "other groups": {**state, "optimizer": {**state["optimizer"], "param_groups": []}},
        "other units": {**state, "partition": {}},
        "other shards": {**state, "partition": shorter},
    }
    refused = {}
    for case, other in unfit.items():
        with pytest.raises(CheckpointError) as error:
            engine.optimizer.load_state_dict(other)
        refused[case] = str(error.value)
    return ends, refused


def run_all():
    prepare_rank()
    return {
        "interventions": {key: intervene(*key) for key in LAYOUTS},
        "bf16": {key: half_precision(*key) for key in LAYOUTS},
        "parts": this_ranks_part(),
        "outside": {stage: outside_a_step(stage) for stage in range(4)},
        "refusals": refusals(),
        "frozen": parameters_without_optimizer(),
        "optimizer": {(stage, name): optimizer_state(stage, each) for stage, name, each in OPTIMIZER_STATES},
    }


LAYOUTS = [*product((2,), range(4)), (4, 1), (4, 3)]
"""Pipeline ranks and ZeRO stage, on four ranks."""
OPTIMIZER_STATES = [(0, "bf16", BF16), (1, "fp32", FP32), (3, "bf16", BF16)]
