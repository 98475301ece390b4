"""Ranks that differ are refused on all ranks, soon, in one sentence that names what differs, with values and ranks."""

import os
import time

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import ds_lgamp
from ds_lgamp.config import ConfigError
from ds_lgamp.partition import agreement
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.config.bad_input import BASE
from tests.integrations.deepspeed.linear import batches, engine_of, mean_square
from tests.integrations.deepspeed.plain.training import configuration
from tests.integrations.deepspeed.plain.training import initialize as plain_engine
from tests.integrations.transformers.models import make, micro_batch

LIMIT = 50.0
"""Seconds, fewer than the 60 after which the process group gives up."""
ODD = 2
"""The rank that differs."""


class One(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) + 1


class Two(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) + 2


def is_odd():
    return dist.get_rank() == ODD


def said(call):
    """Returns the refusal of ``call``, None if there is none, and whether it came soon."""
    start = time.monotonic()
    sentence = None
    try:
        with quiet():
            call()
    except ConfigError as error:
        sentence = str(error)
    return sentence, time.monotonic() - start < LIMIT


def module_of(layers, kind=nn.Linear, width=6):
    return PipelineModule([LayerSpec(kind, 6, width), *[LayerSpec(nn.Linear, width, 6)] * layers], num_stages=2)


def initialize(changes=None, module=None):
    module = module_of(3) if module is None else module
    config = {**BASE, "ds_lgamp": {}, **(changes or {})}
    return deepspeed.initialize(model=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), config=config)[0]


def with_version(module, name, value, call):
    before = getattr(module, name)
    if is_odd():
        setattr(module, name, value)
    try:
        return call()
    finally:
        setattr(module, name, before)


def with_variable():
    if is_odd():
        os.environ["NCCL_ALGO"] = "Ring"
    try:
        return initialize()
    finally:
        os.environ.pop("NCCL_ALGO", None)


def other_code():
    """Layers of one name, whose code differs."""
    kind = Two if is_odd() else One
    kind.__name__ = "Layer"
    return initialize(module=module_of(3, kind))


STARTS = {
    "another key": (
        lambda: initialize({"steps_per_print": 10 + is_odd()}),
        "steps_per_print is 10 on ranks 0, 1 and 3 and 11 on rank 2; give every rank the same configuration",
    ),
    "a misspelt block": (
        lambda: initialize({"ds_lgamp": {"shedule" if is_odd() else "schedule": "layered"}}),
        "ds_lgamp.schedule is 'layered' on ranks 0, 1 and 3 and absent on rank 2",
    ),
    "a refused key": (
        lambda: initialize({"zero_optimization": {"stage": 1, **({"zenflow": {}} if is_odd() else {})}}),
        "zero_optimization.zenflow is absent on ranks 0, 1 and 3 and {} on rank 2",
    ),
    "another batch size": (
        lambda: initialize({"gradient_accumulation_steps": 2 + 2 * is_odd()}),
        "gradient_accumulation_steps is 2 on ranks 0, 1 and 3 and 4 on rank 2",
    ),
    "another version of ds_lgamp": (
        lambda: with_version(agreement, "__version__", "0.0.9", initialize),
        f"the version of ds_lgamp is {ds_lgamp.__version__} on ranks 0, 1 and 3 and 0.0.9 on rank 2; install the same",
    ),
    "another version of torch": (
        lambda: with_version(torch, "__version__", "2.0.0", initialize),
        "and 2.0.0 on rank 2; install the same version on every rank",
    ),
    "another version of deepspeed": (
        lambda: with_version(agreement, "version_of", lambda name: "0.0.7", initialize),
        f"the version of deepspeed is {deepspeed.__version__} on ranks 0, 1 and 3 and 0.0.7 on rank 2",
    ),
    "another variable": (with_variable, "the variable NCCL_ALGO is absent on ranks 0, 1 and 3 and 'Ring' on rank 2"),
    "another number of layers": (
        lambda: initialize(module=module_of(3 + is_odd())),
        "the number of layers is 4 on ranks 0, 1 and 3 and 5 on rank 2; start every rank from the same code",
    ),
    "another layer": (
        lambda: initialize(module=module_of(3, width=6 + is_odd())),
        "tensor 2.weight is [6, 7] torch.float32 on rank 2 and [6, 6] torch.float32 on rank 3; start every rank from",
    ),
    "another class of a layer": (other_code, "layer 0 is Layer with code"),
    "a tensor of another shape": (
        lambda: initialize(module=reshaped(module_of(3))),
        "tensor 2.weight is [6, 5] torch.float32 on rank 2 and [6, 6] torch.float32 on rank 3; start every rank from",
    ),
    "another block, in a plain script": (
        lambda: plain_engine(make("GPT-2"), configuration(1, {"resident_chunks": 1 + is_odd()})),
        "ds_lgamp.resident_chunks is 1 on ranks 0, 1 and 3 and 2 on rank 2",
    ),
    "another model, in a plain script": (
        lambda: plain_engine(sequential(3 + is_odd()), configuration(1, {})),
        "the tensor 3.weight of the model is absent on ranks 0, 1 and 3 and torch.float32 of shape [6, 6] on rank 2",
    ),
}
"""Initialisations that differ, and what is said of them."""


def reshaped(module):
    """Changes a layer after it was built, on one rank."""
    for name, layer in module.named_children():
        if is_odd() and name == "2":
            layer.weight = nn.Parameter(torch.zeros(6, 5))
    return module


class Loss(nn.Module):
    def forward(self, inputs):
        return inputs.square().mean()


def sequential(layers):
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(layers)], Loss())


def start_all():
    prepare_rank()
    ds_lgamp.install()
    return {name: said(call) for name, (call, _) in STARTS.items()}


@pytest.fixture(scope="module")
def starts():
    return run_on_ranks(4, start_all)


@pytest.mark.parametrize("case", STARTS)
def test_ranks_that_start_differently_are_refused(starts, case):
    sentences, soon = zip(*(rank[case] for rank in starts))
    assert len(set(sentences)) == 1 and all(soon)
    assert sentences[0] is not None and STARTS[case][1] in sentences[0] and "\n" not in sentences[0], sentences[0]


def trained(count=2):
    module = PipelineModule([LayerSpec(nn.Linear, 6, 6) for _ in range(4)], num_stages=2, loss_fn=mean_square)
    engine = engine_of(module, {}, 1, micro_batches=count)
    engine.train_batch(batches(count))
    return engine


def other_call(engine):
    (engine.eval_batch if is_odd() else engine.train_batch)(batches(4))


def other_size(engine):
    if is_odd():
        engine.set_train_batch_size(2 * engine.train_batch_size())
    engine.train_batch(batches(4))


def other_rate(engine):
    if is_odd():
        engine.optimizer.param_groups[0]["lr"] = 0.5
    engine.train_batch(batches(2))


def other_step(engine):
    engine.global_steps += is_odd()
    engine.train_batch(batches(2))


STEPS = {
    "another call": (
        other_call,
        "the call is engine.train_batch on ranks 0, 1 and 3 and engine.eval_batch on rank 2; let all ranks call the",
    ),
    "another batch size": (
        other_size,
        "the number of micro-batches is 2 on ranks 0, 1 and 3 and 4 on rank 2; set the same batch size",
    ),
    "another learning rate": (other_rate, "the learning rate is 0.1 on ranks 0, 1 and 3 and 0.5 on rank 2"),
    "another step": (other_step, "the number of steps so far is 1 on ranks 0, 1 and 3 and 2 on rank 2; load the same"),
    "another learning rate, in a plain script": (None, "the learning rate is 0.1 on ranks 0, 1 and 3 and 0.5 on rank"),
}


def plain_rate():
    with quiet():
        engine = plain_engine(make("GPT-2"), configuration(1, {"pipeline_ranks": 2}, 1))
    if is_odd():
        engine.optimizer.param_groups[0]["lr"] = 0.5
    return said(lambda: engine(**micro_batch(0, dist.get_rank(), 0)))


def train_all():
    prepare_rank()
    found = {}
    for name, (act, _) in STEPS.items():
        if act is None:
            found[name] = plain_rate()
            continue
        with quiet():
            engine = trained()
        found[name] = said(lambda: act(engine))  # noqa: B023 called at once
    return found


@pytest.fixture(scope="module")
def steps():
    return run_on_ranks(4, train_all)


@pytest.mark.parametrize("case", STEPS)
def test_ranks_that_go_on_differently_are_refused(steps, case):
    sentences, soon = zip(*(rank[case] for rank in steps))
    assert len(set(sentences)) == 1 and all(soon)
    assert sentences[0] is not None and STEPS[case][1] in sentences[0] and "\n" not in sentences[0], sentences[0]
