"""What user code does with DeepSpeed's pipeline engine works with a block too: at P2 W1 it equals stock DeepSpeed."""

import contextlib
import inspect

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

import ds_lgamp
from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.module import over_pipeline
from ds_lgamp.runtime.executor import ActionError
from tests.engine.models import seed
from tests.engine.running import gathered, prepare_rank, quiet
from tests.ranks import run_on_ranks

ONE_LAYER_PER_CHUNK = {"layers_per_chunk": 1, "placement": "modular"}


def mean_square(output, target):
    return ((output - target) ** 2).mean()


def build(specs, **options):
    with quiet():
        return PipelineModule(specs, num_stages=2, loss_fn=mean_square, seed_layers=True, seed_fn=seed, **options)


def engine_of(module, block, stage=3, optimizer=None, micro_batches=2, **settings):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": micro_batches,
        "zero_optimization": {"stage": stage if block is not None else 1},
        "zero_allow_untested_optimizer": block is None,
        **({} if block is None else {"ds_lgamp": block}),
        **settings,
    }
    ds_lgamp.install()
    if optimizer is None:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with quiet():
        return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def batches(count, width=6, rows=4, start=0):
    generator = torch.Generator().manual_seed(start)
    return iter([(torch.randn(rows, width, generator=generator), torch.zeros(rows, width)) for _ in range(count)])


def both(specs, steps=3, **options):
    """Losses of stock and of the block on fresh modules."""
    runs = []
    for block in (None, ONE_LAYER_PER_CHUNK):
        engine = engine_of(build(specs()), block, **options)
        runs.append([engine.train_batch(batches(2, start=step)).item() for step in range(steps)])
    return runs


def whole_state(module):
    """The state of all pipeline ranks: layers may have moved."""
    own = {name: value.clone() for name, value in module.state_dict().items()}
    return {name: value for rank in over_pipeline(module, own) for name, value in rank.items()}


def in_place_layers():
    return both(lambda: [LayerSpec(nn.Linear, 6, 6), LayerSpec(nn.ReLU, inplace=True)] * 3)


class Doubling(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs.mul_(2.0))


def in_place_first_layer():
    return both(lambda: [LayerSpec(Doubling, 6, 6), LayerSpec(Doubling, 6, 6)])


def batch_norm():
    statistics = []
    for block in (None, ONE_LAYER_PER_CHUNK):
        engine = engine_of(build([LayerSpec(nn.Linear, 6, 6), LayerSpec(nn.BatchNorm1d, 6)]), block)
        engine.train_batch(batches(2))
        statistics.append({name: buffer.tolist() for name, buffer in engine.module.named_buffers()})
    return statistics


def frozen_layers_and_groups_of_a_callable():
    """A frozen layer does not decay; groups that a callable makes keep their learning rates."""
    changes = []
    for block in (None, ONE_LAYER_PER_CHUNK):
        module = build(linears(4))
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith("0."))
        before = whole_state(module)

        def optimizer(parameters):
            listed = list(parameters)
            matrices = [parameter for parameter in listed if parameter.dim() == 2]
            vectors = [parameter for parameter in listed if parameter.dim() < 2]
            groups = [{"params": matrices}, *([{"params": vectors, "lr": 0.0}] if vectors else [])]
            return torch.optim.SGD(groups, lr=0.1, weight_decay=0.5)

        engine = engine_of(module, block, optimizer=optimizer)
        engine.train_batch(batches(2))
        after = whole_state(engine.module)
        changes.append({name: (after[name] - before[name]).abs().max().item() for name in after})
    return changes


def state_dict_after_steps():
    """At every stage the module's state is complete and current."""
    states = []
    for stage in (0, 1, 3):
        engine = engine_of(build([LayerSpec(nn.Linear, 6, 6) for _ in range(4)]), ONE_LAYER_PER_CHUNK, stage)
        engine.train_batch(batches(2))
        states.append({name: value.tolist() for name, value in engine.module.state_dict().items()})
        expected = gathered(engine.optimizer.partition, lambda unit: unit.shard)
        assert {name: value.tolist() for name, value in expected.items()} == states[-1]
        engine.train_batch(batches(2))
    return states


def two_tied_keys():
    """Rank 0 meets key a before key b, rank 1 b before a: their copies are summed in one order all the same."""
    return both(
        lambda: [
            *(TiedLayerSpec(key, nn.Linear, 6, 6) for key in "ab"),
            *(TiedLayerSpec(key, nn.Linear, 6, 6, forward_fn=lambda module, x: x @ module.weight.T) for key in "ba"),
        ],
        steps=2,
    )


def evaluation_first_then_other_sizes():
    """Evaluation before any step, more micro-batches, then rows of another number."""
    results = []
    for block in (None, ONE_LAYER_PER_CHUNK):
        engine = engine_of(build([LayerSpec(nn.Linear, 6, 6) for _ in range(4)]), block)
        losses = [engine.eval_batch(batches(2)).item()]
        losses.append(engine.train_batch(batches(2)).item())
        engine.set_train_batch_size(16)
        losses.append(engine.train_batch(batches(4)).item())
        losses.append(engine.eval_batch(batches(3), num_micro_batches=3).item())
        engine.reset_activation_shape()
        losses.append(engine.train_batch(batches(4, rows=2)).item())
        results.append(losses)
    return results


def training_data():
    """DeepSpeed's own loader, with the loss on another rank than the last."""
    dataset = list(zip(torch.randn(32, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(32, 6)))
    results = []
    for block in (None, ONE_LAYER_PER_CHUNK):
        module = build([LayerSpec(nn.Linear, 6, 6) for _ in range(3)])
        config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
        config |= {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
        config |= {} if block is None else {"ds_lgamp": block}
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with quiet():
            engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, training_data=dataset, config=config)
        results.append([engine.train_batch().item() for _ in range(3)])
    return results


def norm_of_owned_parameters():
    """A parameter that no optimizer owns is not part of the norm."""
    norms = []
    for block in (None, ONE_LAYER_PER_CHUNK):
        module = build([LayerSpec(nn.Linear, 6, 6), LayerSpec(nn.Linear, 6, 6)])
        weights = [parameter for parameter in module.parameters() if parameter.dim() == 2]
        engine = engine_of(module, block, optimizer=torch.optim.SGD(weights, lr=0.1))
        engine.train_batch(batches(2))
        norms.append(float(engine.get_global_grad_norm()))
    return norms


COMPARISONS = [
    in_place_layers,
    in_place_first_layer,
    batch_norm,
    frozen_layers_and_groups_of_a_callable,
    two_tied_keys,
    evaluation_first_then_other_sizes,
    training_data,
    norm_of_owned_parameters,
]


SHARED_WEIGHT = nn.Parameter(torch.eye(6))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = SHARED_WEIGHT

    def forward(self, inputs):
        return inputs @ self.weight


class WithStray(PipelineModule):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.stray = nn.Parameter(torch.ones(1))


def linears(count=2):
    return [LayerSpec(nn.Linear, 6, 6) for _ in range(count)]


def groups_differ(module):
    return torch.optim.SGD([{"params": module.parameters(), "weight_decay": 0.1 * module.stage_id}], lr=0.1)


def refusals():
    """The sentence with which each impossible thing is refused."""

    def refusal(specs, optimizer=None, module=None, **settings):
        made = build(specs) if module is None else module
        with pytest.raises(ConfigError) as error:
            engine_of(made, {}, optimizer=optimizer(made) if optimizer else None, **settings)
        return str(error.value)

    with quiet():
        stray = WithStray(linears(), num_stages=2, loss_fn=mean_square)
    return [
        refusal(linears(), optimizer=lambda module: torch.optim.Adafactor(module.parameters())),
        refusal(linears(), optimizer=groups_differ),
        refusal(linears(), optimizer=lambda module: torch.optim.SGD([nn.Parameter(torch.ones(2, 3))], lr=0.1)),
        refusal([LayerSpec(Shared) for _ in range(4)]),
        refusal(None, module=stray, optimizer=lambda module: torch.optim.SGD(list(module.parameters())[:1], lr=0.1)),
        refusal(None, module=build(linears(), dynamic_shape=True)),
        refusal(None, module=build(linears()).bfloat16()),
        refusal(linears(), bf16={"enabled": True}),
        refusal(linears(), stage=1, gradient_allreduce_op="sum"),
    ]


REFUSED_BECAUSE = [
    "optimizer is Adafactor, which may need whole tensors",
    "groups differ between pipeline ranks",
    "parameter group 0 holds a tensor of shape [2, 3] that belongs to no layer",
    "are the same tensor",
    "parameter stray belongs to no layer",
    "dynamic_shape is True",
    "is torch.bfloat16, but ds_lgamp trains in fp32",
    "bf16.enabled is set",
    "gradient_allreduce_op is set",
]


def after_a_failure():
    """Data that ends in the middle of a batch, and a loss without gradient: the engine says that it cannot go on."""
    messages = []
    with quiet():
        module = PipelineModule(linears(), num_stages=1, loss_fn=mean_square)
    engine = engine_of(module, {})
    with contextlib.suppress(StopIteration):
        engine.train_batch(batches(1))
    for _ in range(2):
        with pytest.raises(ActionError) as error:
            engine.eval_batch(batches(2))
        messages.append(str(error.value))
    with quiet():
        module = PipelineModule(linears(), num_stages=1, loss_fn=lambda output, _: output.detach().mean())
    with pytest.raises(ActionError) as error:
        engine_of(module, {}).train_batch(batches(2))
    return [*messages, str(error.value)]


def run_all():
    prepare_rank()
    results = {function.__name__: function() for function in COMPARISONS}
    results["state_dict"] = state_dict_after_steps()
    results["refusals"] = refusals()
    return results


@pytest.fixture(scope="module")
def results():
    return run_on_ranks(2, run_all)


def approximately(value):
    if isinstance(value, dict):
        return {key: approximately(member) for key, member in value.items()}
    return pytest.approx(value, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("function", COMPARISONS, ids=lambda function: function.__name__)
def test_equals_stock(results, function):
    for rank in results:
        stock, layered = rank[function.__name__]
        assert layered == approximately(stock), inspect.getdoc(function)


def test_the_state_of_the_module_is_complete_and_current(results):
    for rank in results:
        assert rank["state_dict"][0] == rank["state_dict"][1] == rank["state_dict"][2]


@pytest.mark.parametrize("index", range(len(REFUSED_BECAUSE)), ids=REFUSED_BECAUSE)
def test_what_cannot_work_is_refused_in_a_sentence_on_every_rank(results, index):
    sentences = {rank["refusals"][index] for rank in results}
    assert all(REFUSED_BECAUSE[index] in sentence and "\n" not in sentence for sentence in sentences)


def run_failures():
    prepare_rank()
    return after_a_failure()


def test_an_engine_does_not_go_on_after_a_batch_that_failed():
    first, second, loss = run_on_ranks(1, run_failures)[0]
    assert "start anew" in first and "start anew" in second
    assert "the loss needs no gradient" in loss
