"""Every optimizer trains on the shards of two pipeline and two data-parallel ranks like torch's plain version on one
process. Groups and schedules can be given in several ways."""

from functools import partial

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

import ds_lgamp
from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.config import optimizer_choice
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.linear import batches, build, linears, mean_square
from tests.integrations.deepspeed.models import seed
from tests.integrations.deepspeed.running import gathered

LAYERS, STEPS = 4, 4
FUSED = (SGD, Adam, AdamW, Adagrad)
RATE = {"lr": 0.01, "eps": 1e-4}
"""A large eps, because a small one amplifies rounding."""
TRAINED = {
    "Adam": ({"type": "Adam", "params": {**RATE, "weight_decay": 0.1}}, AdamW, {**RATE, "weight_decay": 0.1}),
    "Adam without decay": ({"type": "Adam", "params": RATE}, AdamW, {**RATE, "weight_decay": 0.0}),
    "Adam with L2": (
        {"type": "Adam", "params": {**RATE, "weight_decay": 0.1, "adam_w_mode": False}},
        *(Adam, {**RATE, "weight_decay": 0.1}),
    ),
    "AdamW of torch": ({"type": "AdamW", "params": {**RATE, "torch_adam": True}}, AdamW, RATE),
    "SGD": (
        {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}},
        *(SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    ),
    "Adagrad": (
        {"type": "Adagrad", "params": {"lr": 0.05, "initial_accumulator_value": 0.1}},
        *(Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    ),
    "RMSprop": ({"type": "RMSprop", "params": RATE}, torch.optim.RMSprop, RATE),
}
BASE = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
}


def engine_with(settings, stage=3, block=True, **arguments):
    ds_lgamp.install()
    module = arguments.pop("model", None) or build(linears(LAYERS))
    config = {**BASE, "zero_optimization": {"stage": stage}, **settings}
    config |= {"ds_lgamp": {"layers_per_chunk": 1}} if block else {"zero_allow_untested_optimizer": True}
    with quiet():
        return deepspeed.initialize(model=module, config=config, **arguments)[0]


def data_of(step, data_rank):
    return batches(2, start=10 * step + data_rank)


def losses_of(engine):
    return [engine.train_batch(data_of(step, engine.grid.data_parallel_id)).item() for step in range(STEPS)]


def reference(make):
    """Returns losses and parameters of one process with torch's plain optimizer."""
    layers = []
    for index in range(LAYERS):
        seed(1234 + index)
        layers.append(nn.Linear(6, 6))
    parameters = {f"{index}.{name}": p for index, layer in enumerate(layers) for name, p in layer.named_parameters()}
    optimizer, scheduler = make(parameters)
    losses = []
    for step in range(STEPS):
        micro_batches = [pair for data_rank in range(dist.get_world_size() // 2) for pair in data_of(step, data_rank)]
        loss = sum(mean_square(nn.Sequential(*layers)(inputs), labels) for inputs, labels in micro_batches)
        loss = loss / len(micro_batches)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in parameters.items()}


def compare(engine, make, label):
    """Compares losses and parameters of an engine with those of one process."""
    expected_losses, expected = reference(make)
    assert losses_of(engine) == pytest.approx(expected_losses, rel=1e-5), label
    own = gathered(engine.optimizer.partition, lambda unit: unit.storage.shard)
    assert own, label
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6, msg=lambda text: f"{label}: {text}")


def forbid_compiling():
    from deepspeed.ops.op_builder.builder import OpBuilder

    def load(builder, verbose=True):
        raise AssertionError(f"{builder.name} would be compiled")

    OpBuilder.load = load


def json_optimizers():
    for label, (settings, kind, options) in TRAINED.items():
        for stage in (0, 3) if label in ("Adam", "Adagrad") else (3,):
            engine = engine_with({"optimizer": settings}, stage)
            assert type(engine.basic_optimizer) is kind, label
            fuses = kind in FUSED and "torch_adam" not in settings["params"]
            assert bool(engine.basic_optimizer.param_groups[0].get("fused")) == fuses, label
            plain = partial(kind, foreach=False, **options)
            compare(engine, lambda p, plain=plain: (plain(p.values()), None), label)


def stock_with_torch_adam():
    """Trains stock with the configuration that it needs here, and a block without ``torch_adam``. Returns the losses of
    both."""
    params = {**RATE, "weight_decay": 0.1}
    stock = engine_with({"optimizer": {"type": "AdamW", "params": {**params, "torch_adam": True}}}, 1, block=False)
    return losses_of(stock), losses_of(engine_with({"optimizer": {"type": "AdamW", "params": params}}))


class StandInAdam(AdamW):
    """Takes the options of DeepSpeed's CPU Adam and computes the same update."""

    def __init__(self, params, lr=1e-3, eps=1e-8, weight_decay=0, adamw_mode=True, fp32_optimizer_states=True):
        assert adamw_mode and not fp32_optimizer_states
        super().__init__(params, lr=lr, eps=eps, weight_decay=weight_decay)


def cpu_adam_on_request():
    """Replaces DeepSpeed's CPU Adam by a class without a compiler, because compiling it takes minutes."""
    optimizer_choice.DeepSpeedCPUAdam, optimizer_choice.ON_CPU = StandInAdam, frozenset({StandInAdam})
    params = {**RATE, "weight_decay": 0.1, "fp32_optimizer_states": False}
    engine = engine_with({"optimizer": {"type": "DeepSpeedCPUAdam", "params": params}})
    assert type(engine.basic_optimizer) is StandInAdam
    compare(engine, lambda p: (AdamW(p.values(), **RATE, weight_decay=0.1), None), "CPU Adam")


def groups_by_layer(parameters, first_rate=0.2):
    """Makes three groups: layer 3, the bias of layer 0, and the rest. With modular placement each pipeline rank lacks
    one of them."""
    last = {name: parameter for name, parameter in parameters.items() if name.startswith("3.")}
    bias = {name: parameter for name, parameter in parameters.items() if name == "0.bias"}
    rest = {name: parameter for name, parameter in parameters.items() if name not in {**last, **bias}}
    return [
        {"params": list(last.values()), "lr": first_rate},
        {"params": list(bias.values()), "weight_decay": 0.5},
        {"params": list(rest.values())},
    ]


FACTORS = [lambda step: 1.0 / (1 + step), lambda step: 1.0 if step < 2 else 0.0, lambda step: 2.0 - 0.25 * step]


def scheduled(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, FACTORS)


def groups_and_schedules():
    """Gives groups with their own options and learning rates in all ways, also after ``deepspeed.initialize``."""

    def plain(parameters):
        optimizer = SGD(groups_by_layer(parameters), lr=0.1, momentum=0.5)
        return optimizer, scheduled(optimizer)

    for way in ("client", "callable", "json", "late client", "late callable"):
        module = build(linears(LAYERS))
        groups = groups_by_layer(dict(module.named_parameters()))
        arguments, settings = {"lr_scheduler": scheduled, "model_parameters": groups}, {}
        if way.startswith("late"):
            arguments = {}
        elif way == "client":
            optimizer = SGD(groups, lr=0.1, momentum=0.5)
            arguments = {"optimizer": optimizer, "lr_scheduler": scheduled(optimizer)}
        elif way == "callable":
            arguments["optimizer"] = lambda parameters: SGD(parameters, lr=0.1, momentum=0.5)
        else:
            settings = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}}}
        engine = engine_with(settings, model=module, **arguments)
        if way.startswith("late"):
            configure_late(engine, groups, as_callable=way == "late callable")
        compare(engine, plain, way)
        assert engine.get_lr() == pytest.approx([0.2 / 5, 0.0, 0.1 * 1.0]), way


def configure_late(engine, groups, as_callable):
    """Gives an engine, as it came from ``deepspeed.initialize``, the optimizer, and the optimizer a scheduler of
    torch."""
    if as_callable:
        engine._configure_optimizer(lambda parameters: SGD(parameters, lr=0.1, momentum=0.5), groups)
    else:
        engine._configure_optimizer(SGD(groups, lr=0.1, momentum=0.5), None)
    assert isinstance(engine.optimizer, torch.optim.Optimizer)
    engine.lr_scheduler = scheduled(engine.optimizer)


def late_for_deferred_layers():
    """Layers that have no memory yet get it with the optimizer."""
    with ds_lgamp.deferred_init():
        module = build(linears(LAYERS))
    engine = engine_with({}, model=module)
    engine._configure_optimizer(lambda parameters: SGD(parameters, lr=0.1), None)
    compare(engine, lambda p: (SGD(p.values(), lr=0.1), None), "late and deferred")


def late_in_other_types():
    """Layers have the type of the configuration and the values of the first data-parallel rank, as with an optimizer
    in time."""
    module = build(linears(LAYERS))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += dist.get_rank() % 2
    engine = engine_with({"bf16": {"enabled": True}}, stage=1, model=module)
    engine._configure_optimizer(lambda parameters: SGD(parameters, lr=0.1), list(module.parameters()))
    own = [parameter.detach().float() for parameter in engine.module.parameters()]
    assert own and {parameter.dtype for parameter in engine.module.parameters()} == {torch.bfloat16}
    first = [tensor.clone() for tensor in own]
    for tensor in first:
        dist.broadcast(tensor, engine.grid.dp_group[0], engine.grid.get_data_parallel_group())
    assert all(map(torch.equal, own, first))


def rates_of_the_configuration():
    """DeepSpeed's schedulers take a list with one rate per group."""
    rates = {"warmup_min_lr": [0.0, 0.0, 0.0], "warmup_max_lr": [0.1, 0.2, 0.3], "warmup_num_steps": 2}
    settings = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {**rates, "warmup_type": "linear"}},
    }
    module = build(linears(LAYERS))
    groups = groups_by_layer(dict(module.named_parameters()))
    engine = engine_with(settings, model=module, model_parameters=groups)
    losses_of(engine)
    assert engine.get_lr() == pytest.approx([0.1, 0.2, 0.3])


def named_and_single_parameters():
    """Gives groups in other forms that torch accepts: named parameters, and single tensors."""
    for way in ("client", "groups", "named"):
        module = build(linears(LAYERS))
        named = list(module.named_parameters())
        if way == "client":
            engine = engine_with({}, model=module, optimizer=SGD([{"params": named}], lr=0.1))
        else:
            # Every rank has the same number of single tensors, though under other names.
            singles = [{"params": parameter} for _, parameter in named]
            given = {"groups": singles, "named": [{"params": named}]}[way]
            settings = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
            engine = engine_with(settings, model=module, model_parameters=given)
        compare(engine, lambda p: (SGD(p.values(), lr=0.1), None), way)


def refusal(module=None, settings=None, **arguments):
    with pytest.raises(ConfigError) as error:
        engine_with(settings or {}, model=module, **arguments)
    return str(error.value)


def refusals():
    said = {}
    module = build(linears(LAYERS))
    stepped = SGD(module.parameters(), lr=0.1, momentum=0.9)
    if dist.get_rank() == 3:
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        stepped.step()
    said["history"] = refusal(module, optimizer=stepped)
    module = build(linears(LAYERS))
    rate = 0.1 + 0.1 * (dist.get_rank() % 2)
    said["other rates"] = refusal(module, optimizer=SGD(module.parameters(), lr=rate))
    module = build(linears(LAYERS))
    bias = [parameter for name, parameter in module.named_parameters() if name == "0.bias"]
    twice = [{"params": module.parameters()}, {"params": bias}]
    rate = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    said["two groups"] = refusal(module, rate, model_parameters=twice)
    module = build(linears(LAYERS)).requires_grad_(False)
    said["nothing trains"] = refusal(module, optimizer=SGD(module.parameters(), lr=0.1))
    said["params"] = refusal(settings={"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "differentiable": True}}})
    module = build(linears(LAYERS))
    client = SGD(module.parameters(), lr=0.1)
    engine = engine_with({}, model=module, optimizer=client)
    for owner in (client, engine.optimizer):
        with pytest.raises(ConfigError) as error:
            owner.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        said[type(owner).__name__] = str(error.value)
    late = engine_with({})
    for label, call in (
        ("early batch", lambda: late.train_batch(iter(data_of(0, 0)))),
        ("none", lambda: late._configure_optimizer(None, None)),
        ("early save", lambda: late.save_checkpoint("nowhere")),
        ("second optimizer", lambda: engine._configure_optimizer(SGD, None)),
        ("data type", lambda: setattr(engine, "communication_data_type", torch.bfloat16)),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        said[label] = str(error.value)
    engine.communication_data_type = torch.float32
    return said


def run_all():
    prepare_rank()
    forbid_compiling()
    json_optimizers()
    groups_and_schedules()
    rates_of_the_configuration()
    named_and_single_parameters()
    late_in_other_types()
    late_for_deferred_layers()
    said, losses = refusals(), stock_with_torch_adam()
    cpu_adam_on_request()
    return said, losses


@pytest.fixture(scope="module")
def ranks():
    """Runs the checks. The ranks assert equality with one process."""
    return run_on_ranks(4, run_all)


def test_training_equals_one_process_and_stock(ranks):
    for _, (stock, layered) in ranks:
        assert layered == pytest.approx(stock, rel=1e-6)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("history", "optimizer is SGD with state for whole parameters, which shards cannot take over; pass a new"),
        ("other rates", "parameter groups differ between data-parallel ranks; give every rank the same ones"),
        ("two groups", "parameter 0.bias is in parameter groups 0 and 1; keep it in one"),
        ("nothing trains", "the optimizer holds no parameter that trains; unfreeze one, or give it others"),
        ("params", "optimizer.params is {'lr': 0.1, 'differentiable': True}, but adamw refuses it ("),
        ("SGD", "a parameter group was added after deepspeed.initialize, when the optimizer holds shards; pass all"),
        ("PartitionedOptimizer", "a parameter group was added after deepspeed.initialize"),
        ("early batch", "the engine has no optimizer yet; pass one to deepspeed.initialize, name one in the JSON, or"),
        ("none", "there is no optimizer; pass one to deepspeed.initialize or name one in the JSON, or"),
        ("early save", "the engine has no optimizer yet; pass one"),
        ("second optimizer", "engine._configure_optimizer is called, but the engine has an optimizer already"),
        ("data type", "engine.communication_data_type is set to torch.bfloat16, but gradients travel as torch.float32"),
    ],
)
def test_what_cannot_be_trained_is_refused_alike_on_every_rank(ranks, case, words):
    sentences = {said[case] for said, _ in ranks}
    assert len(sentences) == 1 and words in sentences.pop()
