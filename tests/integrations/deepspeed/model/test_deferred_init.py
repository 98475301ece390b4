"""A model built inside ``ds_lgamp.deferred_init()`` equals an ordinary model and needs less memory to build."""

import os
from contextlib import nullcontext
from itertools import product

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

import ds_lgamp
from ds_lgamp.config import ConfigError
from ds_lgamp.runtime.measure import PeakMemory, live_tensors
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.test_recompute import Attending
from tests.integrations.deepspeed.linear import mean_square, whole_state
from tests.integrations.deepspeed.models import BASE_SEED, Training, layer_specs, seed, tied_logits
from tests.runtime.models import WIDTH, Embedding, TupleBlock, loss_function, micro_batch
from tests.slow import slow_except

CHUNKS = {"layers_per_chunk": 2, "placement": "modular"}
BF16 = {
    "bf16": {"enabled": True},
    "data_types": {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["7.noise"], "grad_accum_dtype": "fp32"},
}


class Buffered(nn.Module):
    """Has more than trained parameters: random buffers, an unregistered tensor, and a constructor that needs a tensor's
    value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.randn(WIDTH) / 10)
        self.scales = torch.linspace(0.5, 1.0, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Parameter(torch.rand(1), requires_grad=False)
        self.rate = torch.linspace(0.0, 0.1, 3)[1].item()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scaled = self.norm(hidden * self.scales.to(hidden.dtype)) + self.noise.to(hidden.dtype)
        return nn.functional.dropout(scaled * self.frozen, self.rate)


class Shift(nn.Module):
    """Has a buffer and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.shift.to(hidden.dtype)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden)


def many_kinds():
    """Returns tied layers, layers with buffers, layers without parameters, a function, and modules built outside."""
    torch.manual_seed(3)
    outside = TupleBlock()
    return [
        TiedLayerSpec("embedding", Embedding),
        LayerSpec(Buffered),
        outside,
        LayerSpec(nn.Dropout, 0.1),
        TiedLayerSpec("wrapped", Wrapped, TupleBlock(), tied_weight_attr="inner.inner.weight"),
        LayerSpec(TupleBlock),
        torch.tanh,
        LayerSpec(Buffered),
        LayerSpec(Shift),
        TiedLayerSpec("wrapped", Wrapped, TupleBlock(), tied_weight_attr="inner.inner.weight"),
        TiedLayerSpec("embedding", Embedding, forward_fn=tied_logits),
    ]


def build(specs, pipeline_ranks, deferred, **options):
    options = {"loss_fn": loss_function, "seed_layers": True, "seed_fn": seed, "base_seed": BASE_SEED, **options}
    with quiet(), ds_lgamp.deferred_init() if deferred else nullcontext():
        return PipelineModule(specs, num_stages=pipeline_ranks, **options)


def engine_of(module, stage=3, block=CHUNKS, **settings):
    """Makes an engine with a client's optimizer whose groups were made before ``deepspeed.initialize``."""
    ds_lgamp.install()
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in module.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.SGD([{"params": matrices, "weight_decay": 0.1}, {"params": others}], lr=0.1)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        **({} if block is None else {"ds_lgamp": block}),
        **settings,
    }
    with quiet():
        return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def batches(step):
    return iter([micro_batch(step, index) for index in range(2)])


def weights_and_losses(specs, pipeline_ranks, deferred, stage, **settings):
    """Trains. Returns the initial state of all pipeline ranks, which of it trains here, and the losses of two steps."""
    module = build(specs, pipeline_ranks, deferred)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not name.endswith("norm.bias"))
    torch.manual_seed(0)
    engine = engine_of(module, stage, **settings)
    assert engine.module is module
    state = whole_state(module)
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    return state, trained, [engine.train_batch(batches(step)).item() for step in range(2)]


def same(first, second):
    """Returns whether both runs have the same state (bits and type), the same trainable parameters, and the same
    losses."""
    state, other = first[0], second[0]
    equal = state.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name]) for name, value in state.items()
    )
    return [equal, first[1] == second[1], first[2] == second[2]]


def compare(layouts):
    """Returns by pipeline ranks and stage whether a deferred model equals the ordinary one."""
    found = {}
    for pipeline_ranks, stage in product(layouts, range(4)):
        # Every stage gets both precisions.
        settings = BF16 if (pipeline_ranks + stage) % 2 else {}
        runs = [
            weights_and_losses(many_kinds(), pipeline_ranks, deferred, stage, **settings) for deferred in (False, True)
        ]
        found[pipeline_ranks, stage] = same(*runs)
    return found


def plain_layers(base):
    """Returns the state of the plain training's layers. Layer i is built under seed ``base`` + i."""
    state = {}
    for index, spec in enumerate(layer_specs(Training())):
        if isinstance(spec, LayerSpec):
            seed(base + index)
            state.update((f"{index}.{name}", value) for name, value in spec.build().state_dict().items())
    return state


def without_seeds():
    """Builds models without their own seeds at several layouts and stages.

    Returns whether the first model is the one that rank 0's generator decides, the same for the second, and whether
    building draws nothing else. The first entry is for a constructor that needs values.
    """
    seed(7)
    torch.randint(2**31, ())
    one_number_drawn = torch.get_rng_state()
    seed(7)
    build([LayerSpec(Buffered)], 1, True, seed_layers=False)
    found = [torch.equal(one_number_drawn, torch.get_rng_state())]
    for pipeline_ranks, stage in ((1, 3), (2, 3), (2, 0), (4, 1)):
        seed(7 + torch.distributed.get_rank())
        options = {"seed_layers": False, "seed_fn": None}
        modules = [build(layer_specs(Training()), pipeline_ranks, True, **options) for _ in range(2)]
        before = torch.get_rng_state()
        states = [whole_state(engine_of(module, stage).module) for module in modules]
        drew_nothing = torch.equal(before, torch.get_rng_state())
        seed(7)
        expected = plain_layers(int(torch.randint(2**31, ())))
        same_weights = [all(torch.equal(state[name], expected[name]) for name in expected) for state in states]
        found.append([states[0].keys() == expected.keys(), *same_weights, drew_nothing])
    return found


def saved_and_loaded(folder):
    """Returns whether deferred models that load saved weights, or those of another engine, then have these weights."""
    first, second, third = (engine_of(build(many_kinds(), 2, True, base_seed=base), **BF16) for base in (1, 2, 3))
    first.train_batch(batches(0))
    first.save_checkpoint(folder)
    second.load_checkpoint(folder)
    third.module.load_state_dict(first.module.state_dict())
    wanted = whole_state(first.module)
    return [
        all(torch.equal(value, wanted[name]) for name, value in whole_state(engine.module).items())
        for engine in (second, third)
    ]


class Unseeded(nn.Module):
    """Draws from the operating system, so every rank gets another number."""

    def __init__(self) -> None:
        super().__init__()
        number = int.from_bytes(os.urandom(3), "big")
        self.weight = nn.Parameter(torch.full((WIDTH,), float(number)))


def unseeded():
    """Returns the values of a tied module on this rank."""
    module = build([TiedLayerSpec("number", Unseeded) for _ in range(2)], 2, True)
    return engine_of(module, block={"layers_per_chunk": 1}).module.state_dict()["tied_modules.number.weight"].tolist()


LAYERS, SIZE = 100, 64


class Residual(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + 0.1 * super().forward(inputs)


def residual_layers():
    return [LayerSpec(Residual, SIZE, SIZE) for _ in range(LAYERS)]


def vectors():
    generator = torch.Generator().manual_seed(0)
    return iter([(torch.randn(4, SIZE, generator=generator), torch.zeros(4, SIZE)) for _ in range(2)])


def peak_of_building():
    """Returns the most bytes of this rank's tensors while module and engine were made, and the loss of a step."""
    prepare_rank()
    with PeakMemory(live_tensors()) as memory:
        before = memory.peak
        module = build(residual_layers(), 2, True, loss_fn=mean_square)
        engine = engine_of(module, block={"layers_per_chunk": 1})
    return memory.peak - before, engine.train_batch(vectors()).item()


@pytest.mark.slow
def test_a_model_of_eight_times_the_peak_of_any_rank_is_built_and_trained():
    results = run_on_ranks(10, peak_of_building)
    layers = []
    for index, spec in enumerate(residual_layers()):
        seed(BASE_SEED + index)
        layers.append(spec.build())
    model = nn.Sequential(*layers)
    whole = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    assert whole >= 8 * max(peak for peak, _ in results)
    # The limit is the rank's own shards and, for a moment, a layer, its flat copy and its shard.
    assert max(peak for peak, _ in results) < whole / 10 + 3 * whole / LAYERS
    expected = sum(mean_square(model(inputs), labels).item() for inputs, labels in vectors()) / 2
    assert [loss for _, loss in results] == pytest.approx([expected] * 10, rel=1e-5)


class Moody(nn.Module):
    """Builds another parameter if tensors have no values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2 if torch.empty(1).is_meta else 3))


def replaced_layer():
    """Replaces a layer on one pipeline rank, as a user might."""
    module = build([LayerSpec(nn.Linear, 6, 6) for _ in range(4)], 2, True)
    if "3" in module._modules:
        module._modules["3"] = nn.Linear(6, 6)
    engine_of(module)


def ones_like(module):
    return {name: torch.ones(value.shape) for name, value in module.state_dict().items()}


WRITES = {
    "init": lambda module, weight: nn.init.xavier_uniform_(weight),
    "truncated": lambda module, weight: nn.init.trunc_normal_(weight),
    "in place": lambda module, weight: weight.mul_(2),
    "data": lambda module, weight: weight.data.normal_(),
    "other data": lambda module, weight: setattr(weight, "data", torch.ones(6, 6)),
    "element": lambda module, weight: weight.detach().__setitem__(0, 1.0),
    "operator": lambda module, weight: weight.data.__iadd__(1),
    "cast": lambda module, weight: module.half(),
    "state": lambda module, weight: module.load_state_dict(ones_like(module)),
}


def refusals():
    """Returns the error of each user action, or None if there is none."""
    module = build([LayerSpec(nn.Linear, 6, 6) for _ in range(2)], 2, True)
    weight = next(module.parameters())
    actions = {name: lambda write=write: write(module, weight) for name, write in WRITES.items()}
    actions["no block"] = lambda: engine_of(module, 1, None)
    actions["replaced"] = replaced_layer
    actions["moody"] = lambda: engine_of(build([LayerSpec(Moody)], 1, True))
    said = {}
    for name, action in actions.items():
        try:
            with torch.no_grad():
                said[name] = action()
        except (ConfigError, RuntimeError) as error:
            said[name] = str(error)
    return said


def selective():
    """Returns for each of this rank's layers whether it was told to recompute selectively."""
    module = build([LayerSpec(Attending) for _ in range(4)], 2, True)
    engine = engine_of(module, block={"recompute": "selective"})
    return [layer.recompute_selectively for layer in engine.module.forward_funcs]


def on_two_ranks():
    prepare_rank()
    return compare((1, 2)), refusals(), selective()


def on_four_ranks(folder):
    prepare_rank()
    return compare((2, 4)), without_seeds(), saved_and_loaded(folder), unseeded()


@pytest.fixture(scope="module")
def two_ranks():
    return run_on_ranks(2, on_two_ranks)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    return run_on_ranks(4, on_four_ranks, str(tmp_path_factory.mktemp("saved")))


@pytest.mark.parametrize("ranks", slow_except(["two_ranks"], ["two_ranks", "four_ranks"]))
def test_state_and_losses_are_those_of_an_ordinary_construction(ranks, request):
    for found, *_ in request.getfixturevalue(ranks):
        assert len(found) >= 8
        assert found == {case: [True, True, True] for case in found}


@pytest.mark.slow
def test_without_seeds_layers_have_their_own_from_rank_0s_generator(four_ranks):
    for _, found, *_ in four_ranks:
        assert found == [True, *[[True, True, False, True]] * 4]


@pytest.mark.slow
def test_values_are_alike_on_all_ranks_whatever_a_layer_draws_from(four_ranks):
    values = [value for *_, values in four_ranks for value in values]
    assert len(values) == 4 * WIDTH and len(set(values)) == 1


@pytest.mark.slow
def test_checkpoints_and_states_load_into_deferred_models(four_ranks):
    assert [found for _, _, found, _ in four_ranks] == [[True, True]] * 4


def test_what_cannot_be_done_is_refused_on_every_rank(two_ranks):
    for _, said, _ in two_ranks:
        for name in WRITES:
            assert "has no values before deepspeed.initialize; load or change weights after it" in said[name], name
        assert "no enabled ds_lgamp block; add one, or build the module outside" in said["no block"]
        assert said["replaced"].startswith("layer 3 was built inside ds_lgamp.deferred_init() and changed since")
        assert said["moody"].startswith("layer 0 builds other parameters or buffers on the meta device")


def test_layers_that_offer_it_recompute_selectively(two_ranks):
    assert [switched for _, _, switched in two_ranks] == [[True, True]] * 2


def test_the_context_leaves_nothing_behind():
    ds_lgamp.install()
    construct, names = PipelineModule.__init__, set(vars(LayerSpec(nn.Linear, 6, 6)))
    with pytest.raises(ZeroDivisionError), ds_lgamp.deferred_init():
        assert PipelineModule.__init__ is not construct
        raise ZeroDivisionError
    assert PipelineModule.__init__ is construct
    spec = LayerSpec(nn.Linear, 6, 6)
    # Outside the context, no process group and no such layers are needed.
    with pytest.raises(Exception), ds_lgamp.deferred_init():  # noqa: B017
        PipelineModule([spec], num_stages=1)
    assert set(vars(spec)) == names and not spec.build().weight.is_meta
