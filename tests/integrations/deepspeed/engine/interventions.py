"""The code of the ranks of test_tensor_access.py: trainings in which user code reads and writes tensors."""

from functools import partial
from itertools import product

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineError
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
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

import ds_lgamp
from ds_lgamp.checkpoint.errors import CheckpointError
from ds_lgamp.config import ConfigError
from testing.deepspeed_rank import prepare_rank, quiet
from tests.integrations.deepspeed.models import (
    MICRO_BATCHES,
    Training,
    build_layers,
    decay_groups,
    loss_of,
    pipeline_module,
    scaled_weights,
)
from tests.integrations.deepspeed.running import batches

TRAINING = Training(blocks=6, tied=True, momentum=0.9, clipping=0.5)
FP32, BF16 = {}, {"bf16": {"enabled": True}}
MOMENTUM = "momentum_buffer"


def engine_of(pipeline_ranks, stage, precision=FP32, clipping=TRAINING.clipping, block=None, hook=None):
    """Builds an engine. The user's optimizer calls ``hook`` after its steps."""
    ds_lgamp.install()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": clipping,
        "zero_optimization": {"stage": stage},
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


def intervene(pipeline_ranks, stage):
    engine = engine_of(pipeline_ranks, stage)
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


def half_precision(pipeline_ranks, stage):
    """Returns pairs of tensors that must be equal, by description."""
    engine = engine_of(pipeline_ranks, stage, BF16, clipping=0)
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


def over_data_ranks(engine, tensor):
    everyone = [None] * engine.dp_world_size
    dist.all_gather_object(everyone, tensor, group=engine.data_parallel_group)
    return everyone


# The view of user code on parameters outside a step.


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


def refusal(call):
    """Returns the error of ``call``."""
    with pytest.raises(ConfigError) as refused:
        call()
    return str(refused.value)


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
