"""A PipelineModule built under ``deepspeed.zero.Init`` equals an ordinary one at every stage."""

import contextlib

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

import ds_lgamp
from ds_lgamp.config import ConfigError
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.linear import batches, engine_of, mean_square, whole_state

BLOCK = {"layers_per_chunk": 1, "placement": "modular"}
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 3},
    "ds_lgamp": BLOCK,
}


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("noise", torch.randn(6) / 10)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) + self.noise


class OwnPipeline(PipelineModule):
    """A user's class. Its constructor gets a layer and a part of another, and builds the rest."""

    def __init__(self, first: nn.Module, inner: nn.Module, stages: int) -> None:
        specs = [
            first,
            TiedLayerSpec("tied", nn.Linear, 6, 6),
            LayerSpec(Wrapped, inner),
            LayerSpec(nn.Linear, 6, 12),
            LayerSpec(nn.LayerNorm, 12),
            LayerSpec(nn.Linear, 12, 6),
            TiedLayerSpec("tied", nn.Linear, 6, 6),
        ]
        super().__init__(specs, num_stages=stages, loss_fn=mean_square)
        nn.init.zeros_(self.tied_modules["tied"].bias)


def contexts(config):
    """Returns pairs of contexts: for the given parts, and for the module."""
    none, init = contextlib.nullcontext, lambda: deepspeed.zero.Init(config_dict_or_path=config)
    return {
        "none": (none, none),
        "both": (init, init),
        "module": (none, init),
        "parts": (init, none),
        "without configuration": (none, deepspeed.zero.Init),
        "nested": (none, lambda: _nested(init, deepspeed.zero.Init)),
    }


@contextlib.contextmanager
def _nested(*makers):
    with contextlib.ExitStack() as stack:
        for make in makers:
            stack.enter_context(make())
        yield


def constructed(first_context, context, stages):
    torch.manual_seed(5)
    with quiet(), first_context():
        first, inner = nn.Linear(6, 6), nn.Linear(6, 6)
    first.weight.requires_grad_(False)
    with quiet(), context():
        return OwnPipeline(first, inner, stages)


def trained(module, stage):
    """Trains. Returns the state at the beginning, the attributes of parameters, the losses of three steps, and the
    frozen parameters."""
    attributes = {name: sorted(vars(parameter)) for name, parameter in module.named_parameters()}
    engine = engine_of(module, BLOCK, stage)
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    state = whole_state(module)
    return state, attributes, [engine.train_batch(batches(2, start=step)).item() for step in range(3)], frozen


def compare(stages):
    """Returns by stage and context whether the module equals the one built without a context."""
    ds_lgamp.install()
    found = {}
    for stage in (1, 3):
        config = {**CONFIG, "zero_optimization": {"stage": stage}}
        wanted = {name: both for name, both in contexts(config).items() if stage == 3 or name in ("none", "both")}
        runs = {name: trained(constructed(*both, stages), stage) for name, both in wanted.items()}
        state, *others = runs["none"]
        for name, (own, *own_others) in runs.items():
            same = own.keys() == state.keys() and all(torch.equal(own[key], state[key]) for key in state)
            found[stage, name] = [same, *(mine == other for mine, other in zip(own_others, others, strict=True))]
    return found


def after_the_contexts():
    """Returns whether zero.Init partitions other modules after a PipelineModule, and nothing after its own end."""
    with deepspeed.zero.Init(), quiet():
        PipelineModule([LayerSpec(nn.Linear, 6, 6)], num_stages=1)
        inside = nn.Linear(6, 6)
    outside, constructors = nn.Linear(6, 6), (PipelineModule.__init__, nn.Linear.__init__, OwnPipeline.__init__)
    wrapped = [constructor.__qualname__.startswith("InsertPostInit") for constructor in constructors]
    return [hasattr(inside.weight, "ds_tensor"), hasattr(outside.weight, "ds_tensor"), *wrapped]


def with_deferred_init(order):
    """Builds two modules inside both contexts. Returns the type of every parameter."""
    makers = [lambda: deepspeed.zero.Init(config_dict_or_path=CONFIG), ds_lgamp.deferred_init]
    with quiet(), _nested(*makers[::order]):
        modules = [PipelineModule([LayerSpec(nn.Linear, 6, 6)], num_stages=1) for _ in range(2)]
    return [parameter.is_meta or type(parameter).__name__ for module in modules for parameter in module.parameters()]


def shared_out_later(stages, group):
    """Gives an existing module to zero.Init.

    Returns whether the weights come back, or the error if zero.Init shared them over other ranks.
    """
    torch.manual_seed(6)
    with quiet():
        module = PipelineModule([LayerSpec(nn.Linear, 6, 6) for _ in range(2)], num_stages=stages, loss_fn=mean_square)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    if group == "data":
        group = module._grid.get_data_parallel_group()
    deepspeed.zero.Init(module=module, config_dict_or_path=CONFIG, data_parallel_group=group)
    assert all(not parameter.numel() for parameter in module.parameters())
    try:
        engine = engine_of(module, {"chunks_per_rank": 1})
    except ConfigError as error:
        return str(error)
    return all(torch.equal(value, state[name]) for name, value in engine.module.state_dict().items())


def on_ranks():
    prepare_rank()
    found = compare(stages=2)
    deferred = [with_deferred_init(order) for order in (1, -1)]
    later = [shared_out_later(2, "data"), shared_out_later(1, None), shared_out_later(2, None)]
    return found, after_the_contexts(), deferred, later, dist.get_rank()


@pytest.fixture(scope="module")
def ranks():
    return run_on_ranks(4, on_ranks)


def test_state_and_losses_are_those_of_an_ordinary_construction(ranks):
    for found, *_ in ranks:
        assert len(found) == 2 + 6
        assert found == {case: [True] * 4 for case in found}


def test_other_modules_are_partitioned_as_before(ranks):
    for _, found, *_ in ranks:
        assert found == [True, False, False, False, False]


def test_deferred_init_inside_and_outside_defers(ranks):
    for _, _, deferred, *_ in ranks:
        assert deferred == [["DeferredParameter"] * 4] * 2


def test_what_was_shared_out_later_comes_back_or_is_refused(ranks):
    for *_, (with_data, alone, refused), rank in ranks:
        assert with_data is alone is True, rank
        assert refused.startswith("deepspeed.zero.Init partitioned parameter 0.weight over ranks [0, 1, 2, 3], but its")
        assert "pipeline rank has only [" in refused and "inside deepspeed.zero.Init or ds_lgamp.defer" in refused
