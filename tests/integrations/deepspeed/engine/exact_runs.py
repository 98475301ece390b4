"""Two runs that are the same to the bit: what they train with, what each shows of itself, and the comparison."""

from functools import partial
from typing import NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

from testing.deepspeed_rank import prepare_rank
from tests.integrations.deepspeed.running import batches, gathered

STEPS = 4
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.01, eps=1e-4, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-4, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=0.01, eps=1e-4, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "nadam": partial(torch.optim.NAdam, lr=0.01, eps=1e-4),
}
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "checked": {"bf16": {"enabled": True, "check_grad_overflow": True}},
    "without copies": {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    },
    # The first steps overflow: 2^40 exceeds fp16.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 40, "loss_scale_window": 2, "hysteresis": 1}},
    "static": {"fp16": {"enabled": True, "loss_scale": 1024}},
}
GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2)]


class Run(NamedTuple):
    """What a training shows of itself."""

    numbers: list[list[float]]
    """Loss, norm, learning rate and loss scale of every step; and losses of evaluations."""
    weights: dict[str, torch.Tensor]
    """The master weights after the last step."""
    states: list[dict]
    """The optimizer's states of the shards."""


def trains(case):
    """Whether DeepSpeed and the engine train so: without copies of weights, from stage 1 on, with Adam and AdamW."""
    if case["precision"] != "without copies":
        return True
    return case["optimizer"] in ("adam", "adamw", "fused") and case.get("stage") != 0


def numbers_of_step(engine, step):
    """Trains a step, and changes the decay of the next one, as a script may. Returns its loss, norm, learning rate and
    loss scale."""
    loss = engine.train_batch(batches(step, engine)).item()
    numbers = [loss, float(engine.get_global_grad_norm()), *engine.get_lr(), engine.optimizer.loss_scale]
    engine.optimizer.param_groups[1]["weight_decay"] = 0.01 * step
    return numbers


def run_of(engine, numbers):
    weights = gathered(engine.optimizer.partition, lambda unit: unit.master.values)
    shards = [shard for group in engine.optimizer.param_groups for shard in group["params"]]
    return Run(numbers, weights, [dict(engine.optimizer.state[shard]) for shard in shards])


def assert_equal_runs(case, found, wanted):
    for step, (own, expected) in enumerate(zip(found.numbers, wanted.numbers, strict=True)):
        assert all(map(_equal, own, expected)), (case, step, own, expected)
    assert wanted.weights.keys() == found.weights.keys()
    for name, expected in wanted.weights.items():
        assert torch.equal(found.weights[name], expected), (case, name)
    for own, expected in zip(found.states, wanted.states, strict=True):
        assert own.keys() == expected.keys(), case
        assert all(_equal(own[key], expected[key]) for key in expected), case


def _equal(one, other):
    """Whether two values, such as states of an optimizer, are the same to the bit. Norms may be NaN."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other or (one != one and other != other)


def check_all(check, cases):
    """Calls ``check`` with each of the ``cases``, on a rank. Returns their number."""
    prepare_rank()
    # DeepSpeed says that a CPU has no fp16, but torch computes in it.
    get_accelerator().is_fp16_supported = lambda: True
    for case in cases:
        check(case)
    return len(cases)
