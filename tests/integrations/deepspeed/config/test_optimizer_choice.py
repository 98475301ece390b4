"""The optimizer class that the configuration selects.

Optimizers that update each element separately give the same results on shards as on whole tensors. Every other one is
refused by name.
"""

import itertools
import sys
from functools import partial

import pytest
import torch
from deepspeed.ops import adagrad, adam, lamb, lion
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.config import optimizer_choice
from ds_lgamp.integrations.deepspeed.config.client_optimizer import complaint_about_history
from ds_lgamp.integrations.deepspeed.config.optimizer_choice import (
    ELEMENTWISE,
    JSON_NAMES,
    ON_ACCELERATOR,
    ON_CPU,
    WHOLE_TENSORS,
    Choice,
    Kernels,
    check_elementwise,
    check_optimizer_type,
    check_updates_alone,
    choose_optimizer,
    counterpart,
    kernels_of,
    translated,
    try_out,
)
from ds_lgamp.integrations.deepspeed.engine.memory import state_tensors, updates_in_place
from ds_lgamp.optimizers.lamb import Lamb
from ds_lgamp.optimizers.muon import Muon
from ds_lgamp.runtime.measure import PeakMemory
from tests.integrations.deepspeed.config.bad_modules import FusedLAMB, FusedLamb

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class ApexAdam(Optimizer):
    """Replaces apex's FusedAdam."""


ON_THIS_CPU = kernels_of(CPU)
NO_KERNELS = Kernels(frozenset(), None)
WITH_APEX = Kernels(frozenset({Adam, AdamW, SGD}), ApexAdam)
WITH_APEX_ALONE = Kernels(frozenset(), ApexAdam)
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
    "torch beside apex, so that checkpoints do not depend on what is installed": (
        *("adam", {"lr": 0.1, "set_grad_none": True}, CUDA, WITH_APEX),
        *(AdamW, {"lr": 0.1, **OFF, "fused": True}),
    ),
    "apex where torch has no kernel": (
        *("adam", {"lr": 0.1, "set_grad_none": True}, CUDA, WITH_APEX_ALONE),
        *(ApexAdam, {"lr": 0.1, "set_grad_none": True, "adam_w_mode": True}),
    ),
    "torch where apex lacks an option": (
        *("adamw", {"amsgrad": True}, CUDA, WITH_APEX_ALONE),
        *(AdamW, {"amsgrad": True, **OFF}),
    ),
    "an implementation the user chose": ("adam", {"fused": False}, CPU, ON_THIS_CPU, AdamW, {"fused": False, **OFF}),
    "SGD": ("SGD", {"momentum": 0.9}, CPU, ON_THIS_CPU, SGD, {"momentum": 0.9, "fused": True}),
    "SGD without a kernel": ("SGD", {"momentum": 0.9}, CPU, NO_KERNELS, SGD, {"momentum": 0.9}),
    "SGD with foreach": ("SGD", {"foreach": True}, CPU, ON_THIS_CPU, SGD, {"foreach": True}),
    "Adagrad": ("adagrad", {"lr": 0.1}, CPU, ON_THIS_CPU, Adagrad, {"lr": 0.1, "fused": True}),
    "Adagrad without a kernel": ("adagrad", {"lr": 0.1}, CUDA, WITH_APEX, Adagrad, {"lr": 0.1}),
    "one that has no kernel": ("NAdam", {"lr": 0.1}, CPU, ON_THIS_CPU, torch.optim.NAdam, {"lr": 0.1}),
    "LAMB, with betas as JSON has them": (
        *("lamb", {"lr": 0.1, "betas": [0, 0.9]}, CPU, ON_THIS_CPU),
        *(Lamb, {"lr": 0.1, "betas": (0.0, 0.9)}),
    ),
    "Muon's options by kind of tensor": (
        *("muon", {"lr": 0.1, "momentum": 0.9, "eps": 1e-6, "betas": [0.9, 0.99], "weight_decay": 0.2}, CPU),
        *(ON_THIS_CPU, Muon),
        {
            "matrices": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2},
            "others": {"lr": 0.1, "eps": 1e-6, "betas": (0.9, 0.99), "weight_decay": 0.2, "fused": True},
        },
    ),
    "Muon with two rates": (
        *("muon", {"lr": 1.0, "muon_lr": 0.1, "adam_lr": 0.2, "ns_method": "standard", "torch_adam": True}, CPU),
        *(ON_THIS_CPU, Muon, {"matrices": {"lr": 0.1, "ns_method": "standard"}, "others": {"lr": 0.2}}),
    ),
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
    """PyPI has another project called apex."""
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
    """Steps an optimizer that holds a vector in parts. Returns the vector and the optimizer."""
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
    if TORCH[name] is getattr(torch.optim, "Muon", None):
        assert counterpart(TORCH[name]) is not None
        return
    known, reason = TORCH[name] in ELEMENTWISE, WHOLE_TENSORS.get(name.lower())
    assert known != (reason is not None), "a new optimizer: look at its update"
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
    """Makes an object of the class without its constructor, because constructors differ."""
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
    assert passed == ON_CPU | ON_ACCELERATOR | {lamb.FusedLamb}
    with pytest.raises(ConfigError, match="takes parameters on the CPU, and they are on cuda"):
        check_elementwise(made_without_parameters(DeepSpeedCPUAdam), True, CUDA)
    with pytest.raises(ConfigError, match="takes parameters on the CPU, and they are on cuda; write AdamW"):
        choose_optimizer("DeepSpeedCPUAdam", {}, CUDA, NO_KERNELS)


# Counterparts on shards


def held(make, **options):
    return make([nn.Parameter(torch.ones(4, 6))], **options)


@pytest.mark.parametrize(
    ("client", "kind", "options"),
    [
        (held(torch.optim.Muon, lr=0.1), Muon, {"lr": 0.1, "use_muon": True, "ns_method": "standard", "blocks": 1}),
        (held(FusedLamb, lr=0.1), Lamb, {"lr": 0.1, "max_coeff": 10.0, "corrects": "step", "adapts_undecayed": True}),
        (
            *(held(FusedLAMB, lr=0.1), Lamb),
            {"max_coeff": float("inf"), "corrects": "moments", "adapts_undecayed": False},
        ),
        (held(FusedLAMB, use_nvlamb=True, lr=0.1), Lamb, {"min_coeff": 0.0, "adapts_undecayed": True}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Optimizer) else "",
)
def test_a_counterpart_has_the_same_groups_and_hooks(client, kind, options):
    called = []
    client.register_step_post_hook(lambda *_: called.append(True))
    (group,), groups = client.param_groups, client.param_groups
    made = translated(client)
    assert type(made) is kind and made.param_groups is groups and made.param_groups[0] is group
    assert options.items() <= group.items()
    made.load_state_dict(made.state_dict())
    assert made.param_groups is groups and made.param_groups[0] is group, "schedulers hold them"
    made.pieces = []
    made._matrices = []
    made.step()
    assert called == [True]


@pytest.mark.parametrize(
    ("client", "words"),
    [
        (held(FusedLamb, lr=0.1, max_grad_norm=1.0), 'set it to 0, and write "gradient_clipping": 1.0'),
        (held(FusedLAMB, lr=0.1, adam_w_mode=False), "FusedLAMB with adam_w_mode False"),
        (held(FusedLAMB, lr=0.1, grad_averaging=False), "FusedLAMB with grad_averaging False"),
        (held(FusedLamb, lr=0.1, min_coeff=20.0), "optimizer is FusedLamb, but min_coeff is 20.0 and max_coeff 10.0"),
    ],
)
def test_what_a_counterpart_lacks_is_refused(client, words):
    with pytest.raises(ConfigError, match=words):
        translated(client)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"per_head_muon": True}, "per_head_muon is True, which Muon on shards does not take; use groups with blocks"),
        ({"adam_w_mode": False}, "adam_w_mode is False, which Muon on shards does not take; use true"),
    ],
)
def test_what_muon_by_name_lacks_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        choose_optimizer("muon", options, CPU, ON_THIS_CPU)


def test_updates_of_single_chunks_are_refused():
    for kind in (Lamb, Muon, FusedLamb):
        with pytest.raises(ConfigError, match=f"overlap_update is true, but {kind.__name__} steps on all tensors of a"):
            check_updates_alone(kind)


def test_other_optimizers_stay_as_they_are():
    client = held(AdamW)
    assert translated(client) is client


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
