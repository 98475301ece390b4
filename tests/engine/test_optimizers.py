"""Every optimizer that updates elements by themselves trains on shards as torch's plain version on one process; what
would need whole tensors is refused."""

import itertools
import sys
from functools import partial

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.ops import adagrad, adam, lamb, lion
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import ds_lgamp
from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed import optimizer_choice
from ds_lgamp.integrations.deepspeed.optimizer import complaint_about_history
from ds_lgamp.integrations.deepspeed.optimizer_choice import (
    ELEMENTWISE,
    JSON_NAMES,
    ON_ACCELERATOR,
    ON_CPU,
    WHOLE_TENSORS,
    Choice,
    Kernels,
    check_elementwise,
    check_optimizer_type,
    choose_optimizer,
    kernels_of,
    state_tensors,
    try_out,
    updates_in_place,
)
from ds_lgamp.runtime.measure import PeakMemory
from tests.engine.linear import batches, build, linears, mean_square
from tests.engine.models import seed
from tests.engine.running import gathered, prepare_rank, quiet
from tests.ranks import run_on_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class ApexAdam(Optimizer):
    """Stands where apex's FusedAdam is imported."""


ON_THIS_CPU = kernels_of(CPU)
NO_KERNELS = Kernels(frozenset(), None)
WITH_APEX = Kernels(frozenset({Adam, AdamW, SGD}), ApexAdam)
OFF = {"weight_decay": 0.0}

CHOICES = {
    "Adam decays as AdamW, by nothing if nothing is said": (
        "adam",
        {},
        CPU,
        ON_THIS_CPU,
        AdamW,
        {**OFF, "fused": True},
    ),
    "AdamW decays by nothing either": (
        "adamw",
        {"lr": 0.1},
        CPU,
        ON_THIS_CPU,
        AdamW,
        {"lr": 0.1, **OFF, "fused": True},
    ),
    "without adam_w_mode, Adam adds to the gradient": (
        *("adam", {"adam_w_mode": False, "weight_decay": 0.1}, CPU, ON_THIS_CPU),
        *(Adam, {"weight_decay": 0.1, "fused": True}),
    ),
    "AdamW is AdamW in every mode": ("adamw", {"adam_w_mode": False}, CPU, ON_THIS_CPU, AdamW, {**OFF, "fused": True}),
    "torch_adam is torch's as DeepSpeed makes it": (
        *("adam", {"torch_adam": True, "foreach": False, "fp32_optimizer_states": True}, CPU, ON_THIS_CPU),
        *(AdamW, {"foreach": False}),
    ),
    "torch_adam without adam_w_mode": (
        *("adam", {"torch_adam": True, "adam_w_mode": False}, CUDA, WITH_APEX),
        *(Adam, {}),
    ),
    "options that torch lacks and that change nothing": (
        *("adam", {"bias_correction": True, "set_grad_none": False, "fp32_optimizer_states": False}, CPU, ON_THIS_CPU),
        *(AdamW, {**OFF, "fused": True}),
    ),
    "whole numbers in betas": ("adam", {"betas": [0, 0.9]}, CPU, NO_KERNELS, AdamW, {"betas": (0.0, 0.9), **OFF}),
    "no bias correction needs DeepSpeed's": (
        *("adamw", {"bias_correction": False}, CPU, ON_THIS_CPU),
        *(FusedAdam, {"bias_correction": False, "adam_w_mode": True}),
    ),
    "no bias correction with apex": (
        *("adam", {"bias_correction": False, "adam_w_mode": False}, CUDA, WITH_APEX),
        *(ApexAdam, {"bias_correction": False, "adam_w_mode": False}),
    ),
    "apex where it is": (
        *("adam", {"lr": 0.1, "set_grad_none": True}, CUDA, WITH_APEX),
        *(ApexAdam, {"lr": 0.1, "set_grad_none": True, "adam_w_mode": True}),
    ),
    "torch where apex lacks an option": (
        *("adamw", {"amsgrad": True}, CUDA, WITH_APEX),
        *(AdamW, {"amsgrad": True, **OFF, "fused": True}),
    ),
    "an implementation the user chose": ("adam", {"fused": False}, CPU, ON_THIS_CPU, AdamW, {"fused": False, **OFF}),
    "SGD": ("SGD", {"momentum": 0.9}, CPU, ON_THIS_CPU, SGD, {"momentum": 0.9, "fused": True}),
    "SGD without a kernel": ("SGD", {"momentum": 0.9}, CPU, NO_KERNELS, SGD, {"momentum": 0.9}),
    "SGD with foreach": ("SGD", {"foreach": True}, CPU, ON_THIS_CPU, SGD, {"foreach": True}),
    "Adagrad": ("adagrad", {"lr": 0.1}, CPU, ON_THIS_CPU, Adagrad, {"lr": 0.1, "fused": True}),
    "Adagrad without a kernel": ("adagrad", {"lr": 0.1}, CUDA, WITH_APEX, Adagrad, {"lr": 0.1}),
    "one that has no kernel": ("NAdam", {"lr": 0.1}, CPU, ON_THIS_CPU, torch.optim.NAdam, {"lr": 0.1}),
    "Lion on the CPU": ("lion", {"lr": 0.1}, CPU, ON_THIS_CPU, DeepSpeedCPULion, {"lr": 0.1}),
    "Lion": ("lion", {"lr": 0.1}, CUDA, NO_KERNELS, FusedLion, {"lr": 0.1}),
    "DeepSpeed's CPU Adam on request": (
        *("DeepSpeedCPUAdam", {"adam_w_mode": False, "fp32_optimizer_states": False}, CPU, ON_THIS_CPU),
        *(DeepSpeedCPUAdam, {"adamw_mode": False, "fp32_optimizer_states": False}),
    ),
}


@pytest.mark.parametrize("case", CHOICES)
def test_what_the_configuration_stands_for(case):
    name, options, device, kernels, kind, expected = CHOICES[case]
    given = dict(options)
    choice = choose_optimizer(name, options, device, kernels)
    assert choice == Choice(kind, expected) and options == given
    assert choice.compiles == (kind.__module__.startswith("deepspeed."))


def test_the_cpu_has_fused_kernels():
    assert ON_THIS_CPU == Kernels(frozenset({SGD, Adam, AdamW, Adagrad}), None)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, False),
        ({"apex/__init__.py": ""}, False),
        ({"apex/__init__.py": "", "apex/optimizers.py": "class FusedAdam: ..."}, False),
        ({"apex/__init__.py": "", "apex/optimizers.py": "", "amp_C.py": ""}, False),
        ({"apex/__init__.py": "", "apex/optimizers.py": "class FusedAdam: ...", "amp_C.py": "raise OSError"}, False),
        ({"apex/__init__.py": "", "apex/optimizers.py": "class FusedAdam: ...", "amp_C.py": ""}, True),
    ],
)
def test_apex_counts_with_its_kernels_and_on_cuda_only(files, found, tmp_path, monkeypatch):
    """Another project is called apex on PyPI."""
    (tmp_path / "apex").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(optimizer_choice, "_has_fused_kernel", lambda kind, device: False)
    for name in ("apex", "apex.optimizers", "amp_C"):
        sys.modules.pop(name, None)
    try:
        assert (kernels_of(CUDA).apex_adam is not None) == found
        assert kernels_of(CPU).apex_adam is None
    finally:
        for name in ("apex", "apex.optimizers", "amp_C"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"momentun": 0.9}),
        ("adam", {"torch_adam": True, "bias_correction": False}),
        ("adam", {"bias_correction": False, "foreach": True}),
        ("adam", {"torch_adam": True, "capturable": True}),
        ("adamw", {"differentiable": True}),
        ("adam", {"fused": True, "foreach": True}),
        ("adam", {"betas": 0.9}),
        ("lion", {"eps": 1e-4}),
        ("DeepSpeedCPUAdam", {"torch_adam": True}),
    ],
)
def test_options_are_tried_before_anything_is_built(name, options):
    with pytest.raises((TypeError, ValueError, RuntimeError, AssertionError)):
        try_out(choose_optimizer(name, options, CPU, ON_THIS_CPU), CPU)


# Shards

OPTIONS = {
    SGD: [{"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}, {}],
    Adam: [{"weight_decay": 0.1}, {"amsgrad": True}],
    AdamW: [{"weight_decay": 0.1}, {"amsgrad": True, "maximize": True}],
    Adagrad: [{"initial_accumulator_value": 0.3, "lr_decay": 0.1}],
    torch.optim.RMSprop: [{"momentum": 0.5, "centered": True}, {"momentum": 0.5}, {}],
}
EVERY_OPTION = [(kind, {"lr": 0.1, **options}) for kind in ELEMENTWISE for options in OPTIONS.get(kind, [{}])]
EVERY_OPTION.sort(key=lambda case: (case[0].__name__, str(case[1])))


def updated(make, cuts, steps=4):
    """A vector after some steps of an optimizer that holds it in parts, and the optimizer."""
    values, generator = torch.linspace(-1.0, 1.0, 10), torch.Generator().manual_seed(0)
    parts = [nn.Parameter(values[start:end].clone()) for start, end in zip([0, *cuts], [*cuts, 10])]
    optimizer = make(parts)
    for _ in range(steps):
        for part, gradient in zip(parts, torch.randn(10, generator=generator).tensor_split(cuts)):
            part.grad = gradient.clone()
        optimizer.step()
    return torch.cat([part.detach() for part in parts]), optimizer


@pytest.mark.parametrize(("kind", "options"), EVERY_OPTION)
def test_elements_are_updated_by_themselves_and_alike_by_the_fused_kernel(kind, options):
    whole, _ = updated(partial(kind, foreach=False, **options), [])
    torch.testing.assert_close(updated(partial(kind, foreach=False, **options), [4, 7])[0], whole, rtol=0, atol=0)
    if kind in ON_THIS_CPU.fused:
        fused, _ = updated(partial(kind, fused=True, **options), [4, 7])
        torch.testing.assert_close(fused, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "options"), EVERY_OPTION)
def test_what_an_optimizer_keeps_is_known(kind, options):
    _, optimizer = updated(partial(kind, foreach=False, **options), [])
    (state,) = optimizer.state.values() or [{}]
    kept = [value for value in state.values() if isinstance(value, torch.Tensor) and value.numel() == 10]
    assert state_tensors(kind, optimizer.param_groups[0]) == len(kept)


@pytest.mark.parametrize(("kind", "options"), EVERY_OPTION)
def test_what_updates_in_place_takes_nothing_else(kind, options):
    for fused in (False, True) if kind in ON_THIS_CPU.fused else (False,):
        implementation = {"fused": True} if fused else {"foreach": False}
        _, optimizer = updated(partial(kind, **implementation, **options), [])
        (parameter,) = optimizer.param_groups[0]["params"]
        state = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
        with PeakMemory([parameter, parameter.grad, *state]) as memory:
            before = memory.live()
            optimizer.step()
        assert updates_in_place(kind, optimizer.param_groups[0]) == fused
        if fused:
            assert memory.peak == before
    assert not updates_in_place(type("Own", (SGD,), {}), {"fused": True}) and updates_in_place(FusedAdam, {})


# Names


def optimizers_in(*modules):
    members = [pair for module in modules for pair in vars(module).items()]
    return {name: kind for name, kind in members if isinstance(kind, type) and issubclass(kind, Optimizer)}


TORCH, DEEPSPEED = optimizers_in(torch.optim), optimizers_in(adagrad, adam, lamb, lion)
GONE = ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"]


@pytest.mark.parametrize("name", sorted(set(TORCH) - {"Optimizer"}))
def test_every_optimizer_of_torch_works_on_shards_or_is_refused_with_the_reason(name):
    known, reason = TORCH[name] in ELEMENTWISE, WHOLE_TENSORS.get(name.lower())
    assert known != (reason is not None), "a new one: look at its update"
    config_name = name.lower() if name.lower() in DEEPSPEED_OPTIMIZERS else name
    checks = [
        partial(check_optimizer_type, config_name),
        lambda vouched: check_elementwise(made_without_parameters(TORCH[name]), vouched, CPU),
    ]
    for check, vouched in itertools.product(checks, (False, True)):
        if known:
            check(vouched)
            continue
        with pytest.raises(ConfigError) as error:
            check(vouched)
        assert reason in str(error.value) and "SGD" in str(error.value)


def made_without_parameters(kind):
    """An object of the class; how one is made differs."""
    return kind.__new__(kind)


@pytest.mark.parametrize("name", [*DEEPSPEED_OPTIMIZERS, *GONE, "Adma", "lr_scheduler"])
def test_every_name_of_deepspeed_is_known(name):
    if name in JSON_NAMES:
        check_optimizer_type(name, False)
        return
    with pytest.raises(ConfigError) as error:
        check_optimizer_type(name, True)
    assert WHOLE_TENSORS.get(name.lower(), "is unknown") in str(error.value)
    assert f"optimizer.type is '{name}'" in str(error.value)


def test_of_deepspeeds_classes_these_pass():
    passed = set()
    for kind in DEEPSPEED.values():
        try:
            check_elementwise(made_without_parameters(kind), False, CPU)
        except ConfigError:
            continue
        passed.add(kind)
    assert passed == ON_CPU | ON_ACCELERATOR
    with pytest.raises(ConfigError, match="takes parameters on the CPU, and they are on cuda"):
        check_elementwise(made_without_parameters(DeepSpeedCPUAdam), True, CUDA)
    with pytest.raises(ConfigError, match="takes parameters on the CPU, and they are on cuda; write AdamW"):
        choose_optimizer("DeepSpeedCPUAdam", {}, CUDA, NO_KERNELS)


def test_a_subclass_or_a_namesake_needs_a_word_of_the_user():
    for kind in (type("AdamW", (AdamW,), {}), type("FusedAdam", (Optimizer,), {})):
        with pytest.raises(ConfigError, match="if zero_allow_untested_optimizer is true"):
            check_elementwise(made_without_parameters(kind), False, CPU)
        check_elementwise(made_without_parameters(kind), True, CPU)


def test_an_optimizer_that_has_taken_steps_is_told_from_one_that_has_not():
    for kind in (Adam, Adagrad, SGD):
        assert complaint_about_history(kind([nn.Parameter(torch.ones(3))], lr=0.1)) is None
    for kind, options in ((Adam, {}), (Adagrad, {}), (SGD, {"momentum": 0.9})):
        _, optimizer = updated(partial(kind, lr=0.1, **options), [])
        assert f"optimizer is {kind.__name__} with state" in complaint_about_history(optimizer)


# Training on two pipeline and two data-parallel ranks

LAYERS, STEPS = 4, 4
RATE = {"lr": 0.01, "eps": 1e-4}
"""A large eps: a small one amplifies rounding."""
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
    """Losses and parameters of one process with torch's plain optimizer."""
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
    """Losses and parameters of an engine and of one process."""
    expected_losses, expected = reference(make)
    assert losses_of(engine) == pytest.approx(expected_losses, rel=1e-5), label
    own = gathered(engine.optimizer.partition, lambda unit: unit.shard)
    assert own, label
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6, msg=lambda text: f"{label}: {text}")


def forbid_compiling():
    from deepspeed.ops.op_builder.builder import OpBuilder

    def load(builder, verbose=True):
        raise AssertionError(f"{builder.name} is compiled")

    OpBuilder.load = load


def json_optimizers():
    for label, (settings, kind, options) in TRAINED.items():
        for stage in (0, 3) if label in ("Adam", "Adagrad") else (3,):
            engine = engine_with({"optimizer": settings}, stage)
            assert type(engine.basic_optimizer) is kind, label
            fuses = kind in ON_THIS_CPU.fused and "torch_adam" not in settings["params"]
            assert bool(engine.basic_optimizer.param_groups[0].get("fused")) == fuses, label
            plain = partial(kind, foreach=False, **options)
            compare(engine, lambda p, plain=plain: (plain(p.values()), None), label)


def stock_with_torch_adam():
    """The configuration stock needs here, and the same without ``torch_adam``."""
    params = {**RATE, "weight_decay": 0.1}
    stock = engine_with({"optimizer": {"type": "AdamW", "params": {**params, "torch_adam": True}}}, 1, block=False)
    return losses_of(stock), losses_of(engine_with({"optimizer": {"type": "AdamW", "params": params}}))


class StandInAdam(AdamW):
    """Takes what DeepSpeed's CPU Adam takes and computes what it would."""

    def __init__(self, params, lr=1e-3, eps=1e-8, weight_decay=0, adamw_mode=True, fp32_optimizer_states=True):
        assert adamw_mode and not fp32_optimizer_states
        super().__init__(params, lr=lr, eps=eps, weight_decay=weight_decay)


def cpu_adam_on_request():
    """Compiling it takes minutes: a class that needs no compiler stands where it would be imported."""
    optimizer_choice.DeepSpeedCPUAdam, optimizer_choice.ON_CPU = StandInAdam, frozenset({StandInAdam})
    params = {**RATE, "weight_decay": 0.1, "fp32_optimizer_states": False}
    engine = engine_with({"optimizer": {"type": "DeepSpeedCPUAdam", "params": params}})
    assert type(engine.basic_optimizer) is StandInAdam
    compare(engine, lambda p: (AdamW(p.values(), **RATE, weight_decay=0.1), None), "CPU Adam")


def groups_by_layer(parameters, first_rate=0.2):
    """Of layer 3, of layer 0's bias, and the rest: with modular placement each pipeline rank lacks one of them."""
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
    """Groups with options of their own, each with its own learning rates, in all three ways to give them."""

    def plain(parameters):
        optimizer = SGD(groups_by_layer(parameters), lr=0.1, momentum=0.5)
        return optimizer, scheduled(optimizer)

    for way in ("client", "callable", "json"):
        module = build(linears(LAYERS))
        groups = groups_by_layer(dict(module.named_parameters()))
        arguments, settings = {"lr_scheduler": scheduled, "model_parameters": groups}, {}
        if way == "client":
            optimizer = SGD(groups, lr=0.1, momentum=0.5)
            arguments = {"optimizer": optimizer, "lr_scheduler": scheduled(optimizer)}
        elif way == "callable":
            arguments["optimizer"] = lambda parameters: SGD(parameters, lr=0.1, momentum=0.5)
        else:
            settings = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}}}
        engine = engine_with(settings, model=module, **arguments)
        compare(engine, plain, way)
        assert engine.get_lr() == pytest.approx([0.2 / 5, 0.0, 0.1 * 1.0]), way


def rates_of_the_configuration():
    """DeepSpeed's schedulers take a list, one rate for each group."""
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
    """What torch takes as a group: named parameters, a tensor by itself."""
    for way in ("client", "groups", "named"):
        module = build(linears(LAYERS))
        named = list(module.named_parameters())
        if way == "client":
            engine = engine_with({}, model=module, optimizer=SGD([{"params": named}], lr=0.1))
        else:
            # Of the tensors by themselves every rank has as many, though under other names.
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
    return said


def run_all():
    prepare_rank()
    forbid_compiling()
    json_optimizers()
    groups_and_schedules()
    rates_of_the_configuration()
    named_and_single_parameters()
    said, losses = refusals(), stock_with_torch_adam()
    cpu_adam_on_request()
    return said, losses


@pytest.fixture(scope="module")
def ranks():
    """Equality with one process is asserted on the ranks."""
    return run_on_ranks(4, run_all)


def test_training_equals_one_process_and_stock(ranks):
    for _, (stock, layered) in ranks:
        assert layered == pytest.approx(stock, rel=1e-6)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("history", "optimizer is SGD with state for whole parameters, which shards cannot take over; pass one that"),
        ("other rates", "parameter groups differ between data-parallel ranks; give every rank the same ones"),
        ("two groups", "parameter 0.bias is in parameter groups 0 and 1; keep it in one"),
        ("nothing trains", "the optimizer holds no parameter that trains; unfreeze one, or give it others"),
        ("params", "optimizer.params is {'lr': 0.1, 'differentiable': True}, but adamw refuses it ("),
        ("SGD", "a parameter group was added after deepspeed.initialize, when the optimizer holds shards; give it all"),
        ("PartitionedOptimizer", "a parameter group was added after deepspeed.initialize"),
    ],
)
def test_what_cannot_be_trained_is_refused_alike_on_every_rank(ranks, case, words):
    sentences = {said[case] for said, _ in ranks}
    assert len(sentences) == 1 and words in sentences.pop()
