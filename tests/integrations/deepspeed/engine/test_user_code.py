"""User code that works with DeepSpeed's pipeline engine works with a block too. At P2 W1 it gives the results of stock
DeepSpeed."""

import functools
import inspect

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from ds_lgamp.config import ConfigError
from ds_lgamp.runtime.batch import ActionError
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.linear import (
    ONE_LAYER_PER_CHUNK,
    batches,
    both,
    build,
    engine_of,
    linears,
    mean_square,
    whole_state,
)
from tests.integrations.deepspeed.models import seed
from tests.integrations.deepspeed.running import gathered


def without_and_with_a_block(run):
    """Returns a function of no arguments, which returns what ``run`` does for stock DeepSpeed and for the block."""

    @functools.wraps(run)
    def run_both():
        return [run(block) for block in (None, ONE_LAYER_PER_CHUNK)]

    return run_both


def in_place_layers():
    return both(lambda: [LayerSpec(nn.Linear, 6, 6), LayerSpec(nn.ReLU, inplace=True)] * 3)


class Doubling(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs.mul_(2.0))


def in_place_first_layer():
    return both(lambda: [LayerSpec(Doubling, 6, 6), LayerSpec(Doubling, 6, 6)])


@without_and_with_a_block
def batch_norm(block):
    engine = engine_of(build([LayerSpec(nn.Linear, 6, 6), LayerSpec(nn.BatchNorm1d, 6)]), block)
    engine.train_batch(batches(2))
    return {name: buffer.tolist() for name, buffer in engine.module.named_buffers()}


@without_and_with_a_block
def frozen_layers_and_groups_of_a_callable(block):
    """A frozen layer does not decay. Groups that a callable makes keep their learning rates."""
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
    return {name: (after[name] - before[name]).abs().max().item() for name in after}


@without_and_with_a_block
def parameters_get_other_tensors(block):
    """The script sets ``parameter.data``, before the first batch and after it. The same parameters train on."""
    losses = []
    for stage in (0, 1):
        engine = engine_of(build(linears(4)), block, stage)
        for _ in range(3):
            for parameter in engine.module.parameters():
                parameter.data = parameter.data.clone()
            losses.append(engine.train_batch(batches(2)).item())
    return losses


@without_and_with_a_block
def gradients_end_at_the_inputs(block):
    """Micro-batches are parts of what another module has computed."""
    engine = engine_of(build(linears(2)), block)
    encoder = nn.Linear(6, 6, bias=False)
    nn.init.eye_(encoder.weight)
    rows = torch.cat([inputs for inputs, _ in batches(2)])
    parts = encoder(rows).split(len(rows) // 2)
    return [engine.train_batch(iter([(part, part.detach()) for part in parts])).item(), encoder.weight.grad]


def state_dict_after_steps():
    """At every stage the module's state is complete and current."""
    states = []
    for stage in (0, 1, 3):
        engine = engine_of(build([LayerSpec(nn.Linear, 6, 6) for _ in range(4)]), ONE_LAYER_PER_CHUNK, stage)
        engine.train_batch(batches(2))
        states.append({name: value.tolist() for name, value in engine.module.state_dict().items()})
        expected = gathered(engine.optimizer.partition, lambda unit: unit.storage.shard)
        assert {name: value.tolist() for name, value in expected.items()} == states[-1]
        engine.train_batch(batches(2))
    return states


def two_tied_keys():
    """Rank 0 meets key a before key b, and rank 1 b before a. Both sum the copies in the same order."""
    return both(
        lambda: [
            *(TiedLayerSpec(key, nn.Linear, 6, 6) for key in "ab"),
            *(TiedLayerSpec(key, nn.Linear, 6, 6, forward_fn=lambda module, x: x @ module.weight.T) for key in "ba"),
        ],
        steps=2,
    )


@without_and_with_a_block
def evaluation_first_then_other_sizes(block):
    """Evaluates before any step, then trains with more micro-batches, then with another number of rows."""
    engine = engine_of(build([LayerSpec(nn.Linear, 6, 6) for _ in range(4)]), block)
    losses = [engine.eval_batch(batches(2)).item()]
    losses.append(engine.train_batch(batches(2)).item())
    engine.set_train_batch_size(16)
    losses.append(engine.train_batch(batches(4)).item())
    losses.append(engine.eval_batch(batches(3), num_micro_batches=3).item())
    engine.reset_activation_shape()
    losses.append(engine.train_batch(batches(4, rows=2)).item())
    return losses


@without_and_with_a_block
def training_data(block):
    """Uses DeepSpeed's own loader. The loss is not on the last rank."""
    dataset = list(zip(torch.randn(32, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(32, 6)))
    module = build([LayerSpec(nn.Linear, 6, 6) for _ in range(3)])
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    config |= {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    config |= {} if block is None else {"ds_lgamp": block}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with quiet():
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, training_data=dataset, config=config)
    return [engine.train_batch().item() for _ in range(3)]


@without_and_with_a_block
def norm_of_owned_parameters(block):
    """A parameter that no optimizer owns is not part of the norm."""
    module = build([LayerSpec(nn.Linear, 6, 6), LayerSpec(nn.Linear, 6, 6)])
    weights = [parameter for parameter in module.parameters() if parameter.dim() == 2]
    engine = engine_of(module, block, optimizer=torch.optim.SGD(weights, lr=0.1))
    engine.train_batch(batches(2))
    return float(engine.get_global_grad_norm())


class Reporting(PipelineModule):
    """Reports two losses beside the one that it trains on."""

    reported = {"largest": torch.zeros(()), "smallest": torch.zeros(())}

    def loss(self, output, target):
        difference = (output - target).detach()
        self.reported = {"largest": difference.max(), "smallest": difference.min()}
        return mean_square(output, target)

    def get_additional_losses(self):
        return self.reported


@without_and_with_a_block
def several_losses(block):
    with quiet():
        module = Reporting(linears(4), num_stages=2, seed_layers=True, seed_fn=seed)
    module.loss_fn = module.loss
    engine = engine_of(module, block)
    steps = []
    for step in range(2):
        engine.train_batch(batches(2, start=step))
        steps.append({name: float(value) for name, value in engine.get_additional_losses().items()})
    return {"steps": steps, "applied": engine.was_step_applied()}


class Announcing(nn.Linear):
    """The last layer returns the loss. The additional report is constant."""

    def forward(self, inputs):
        return super().forward(inputs).square().mean()


class ReportingWithoutLossFunction(PipelineModule):
    def get_additional_losses(self):
        return {"constant": torch.tensor(0.25)}


def additional_losses_without_a_loss_function():
    """GPipe's order computes the last chunk twice, but its losses count once."""
    results = []
    for block in (None, {"schedule": "gpipe"}):
        with quiet():
            layers = [*linears(3), LayerSpec(Announcing, 6, 6)]
            module = ReportingWithoutLossFunction(layers, num_stages=2, seed_layers=True, seed_fn=seed)
        engine = engine_of(module, block)
        loss = engine.train_batch(batches(2)).item()
        results.append({"loss": loss, "constant": float(engine.get_additional_losses()["constant"])})
    return results


def dropout_of_seeded_layers():
    """Each layer, micro-batch and step has a seed of its own."""
    return both(lambda: [LayerSpec(nn.Linear, 6, 6), LayerSpec(nn.Dropout, 0.5)] * 2)


def normed_linear():
    return nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))


class Normed(nn.Module):
    """Every forward changes a buffer that its result depends on."""

    def __init__(self):
        super().__init__()
        self.inner = normed_linear()

    def forward(self, inputs):
        return self.inner(inputs)


def buffers_that_forwards_move():
    return both(lambda: [LayerSpec(nn.Linear, 6, 6), LayerSpec(Normed), LayerSpec(nn.Linear, 6, 6), LayerSpec(Normed)])


class Averaging(nn.Linear):
    """Every forward replaces a buffer that its result depends on."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("average", torch.zeros(6))

    def forward(self, inputs):
        self.average = 0.9 * self.average + inputs.detach().mean(0)
        return super().forward(inputs) * (1 + self.average)


def buffers_that_forwards_replace():
    return both(lambda: [LayerSpec(Averaging) for _ in range(4)])


@without_and_with_a_block
def a_loss_that_changes_its_labels(block):
    module = build(linears(4))
    module.loss_fn = lambda output, target: mean_square(output, target.add_(1.0))
    engine = engine_of(module, block)
    return [engine.train_batch(batches(2, start=step)).item() for step in range(3)]


@without_and_with_a_block
def logits_of_an_evaluation(block):
    engine = engine_of(build(linears(4)), block)
    # Keeps this order, because stock adds the results of two evaluations, whatever they are.
    options = {"compute_loss": False, "reduce_output": None, "bcast_loss": False}
    outputs = engine.eval_batch(batches(2), **options)
    loss, logits = engine.eval_batch(batches(2), return_logits=True)
    engine.train_batch(batches(2))
    return [
        loss.item(),
        None if logits is None else logits.tolist(),
        None if outputs is None else [output.tolist() for output in outputs],
        engine.eval_batch(batches(2)).item(),
    ]


def shapes_that_change_within_a_batch():
    results = []
    for block in (None, ONE_LAYER_PER_CHUNK, {**ONE_LAYER_PER_CHUNK, "recompute": "none"}):
        engine = engine_of(build(linears(4), dynamic_shape=True), block, micro_batches=4)
        steps = []
        for step in range(3):
            rows = [next(batches(1, rows=1 + (step + index) % 3, start=index)) for index in range(4)]
            steps.append(engine.train_batch(iter(rows)).item())
            steps.append(engine.eval_batch(batches(4, rows=2 + step)).item())
        results.append(steps)
    assert results[1] == results[2]
    return results[:2]


class Masked(nn.Linear):
    """Takes and returns activations with a boolean and an integer tensor."""

    def forward(self, inputs):
        hidden, keep, count = inputs if isinstance(inputs, tuple) else (inputs, inputs > 0, torch.arange(4))
        return super().forward(hidden) * keep + count[:, None], ~keep, count + 1


def first_member(inputs):
    return inputs[0]


def masks_and_numbers_beside_activations():
    return both(lambda: [LayerSpec(Masked, 6, 6) for _ in range(4)] + [first_member])


COMPARISONS = [
    in_place_layers,
    in_place_first_layer,
    batch_norm,
    frozen_layers_and_groups_of_a_callable,
    two_tied_keys,
    evaluation_first_then_other_sizes,
    training_data,
    norm_of_owned_parameters,
    several_losses,
    additional_losses_without_a_loss_function,
    dropout_of_seeded_layers,
    buffers_that_forwards_move,
    buffers_that_forwards_replace,
    a_loss_that_changes_its_labels,
    logits_of_an_evaluation,
    shapes_that_change_within_a_batch,
    masks_and_numbers_beside_activations,
    parameters_get_other_tensors,
    gradients_end_at_the_inputs,
]


def after_a_failure():
    """A layer raises, or a loss has no gradient. Returns the first error, and those of further batches."""

    def fail(_):
        raise ArithmeticError("the layer is in trouble")

    prepare_rank()
    messages = []
    for layers, loss in (([fail], mean_square), (linears(), lambda output, _: output.detach().mean())):
        with quiet():
            module = PipelineModule([*linears(1), *layers], num_stages=1, loss_fn=loss)
        engine = engine_of(module, {})
        for run in (engine.train_batch, engine.train_batch, engine.eval_batch):
            with pytest.raises(ActionError) as error:
                run(batches(2))
            messages.append(str(error.value))
    return messages


def run_all():
    prepare_rank()
    results = {function.__name__: function() for function in COMPARISONS}
    results["state_dict"] = state_dict_after_steps()
    return results


@pytest.fixture(scope="module")
def results():
    return run_on_ranks(2, run_all)


def approximately(value):
    if isinstance(value, dict):
        return {key: approximately(member) for key, member in value.items()}
    if isinstance(value, list):
        return [approximately(member) for member in value]
    return value if value is None else pytest.approx(value, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("function", COMPARISONS, ids=lambda function: function.__name__)
def test_user_code_gets_the_results_of_stock_deepspeed(results, function):
    for rank in results:
        stock, layered = rank[function.__name__]
        assert layered == approximately(stock), inspect.getdoc(function)


def test_the_state_of_the_module_is_complete_and_current(results):
    for rank in results:
        assert rank["state_dict"][0] == rank["state_dict"][1] == rank["state_dict"][2]


def groups_that_a_callable_leaves_out():
    """Rank 0 has no parameters of the second group. Returns how many groups each rank has, and the refusal of a
    callable that leaves it out."""
    prepare_rank()
    specs = [*(LayerSpec(nn.Linear, 6, 6, bias=layer % 2 == 1) for layer in range(4))]

    def groups_of(parameters):
        listed = list(parameters)
        matrices, vectors = ([each for each in listed if (each.dim() == 2) == wanted] for wanted in (True, False))
        return {"params": matrices}, {"params": vectors, "lr": 0.05}

    engine = engine_of(
        build(specs), ONE_LAYER_PER_CHUNK, optimizer=lambda given: torch.optim.SGD(groups_of(given), lr=0.1)
    )
    engine.train_batch(batches(2))

    def lean(given):
        return torch.optim.SGD([group for group in groups_of(given) if group["params"]], lr=0.1)

    with pytest.raises(ConfigError) as error:
        engine_of(build(specs), ONE_LAYER_PER_CHUNK, optimizer=lean)
    return len(engine.optimizer.param_groups), str(error.value)


def test_a_group_that_is_empty_on_some_rank_is_a_group_of_all():
    for groups, refusal in run_on_ranks(2, groups_that_a_callable_leaves_out):
        assert groups == 2 and "that the optimizer's callable makes differ between ranks" in refusal


def shifted(tokens):
    return (tokens + 1) % 8


def token_ids_between_chunks():
    """Trains with a chunk that passes on token ids alone, and with the embedding in that chunk."""
    prepare_rank()
    losses = []
    for layers in (1, 2):
        specs = [shifted, LayerSpec(nn.Embedding, 8, 6), *linears(2)]
        engine = engine_of(build(specs), {"layers_per_chunk": layers, "placement": "modular"})
        steps = []
        for step in range(3):
            tokens = torch.arange(4 * 2).view(2, 4) + step
            steps.append(engine.train_batch(iter([(each % 8, torch.zeros(4, 6)) for each in tokens])).item())
        losses.append(steps)
    return losses


def test_a_chunk_may_pass_on_token_ids_alone():
    for alone, together in run_on_ranks(2, token_ids_between_chunks):
        assert alone == approximately(together)


def raised_before_a_step_begins():
    prepare_rank()
    engine = engine_of(build(linears()), ONE_LAYER_PER_CHUNK)
    with torch.no_grad(), pytest.raises(RuntimeError) as error:
        engine.train_batch(batches(2))
    return str(error.value)


def test_an_error_ahead_of_the_step_is_told_as_it_is():
    for sentence in run_on_ranks(2, raised_before_a_step_begins):
        assert "requires gradients enabled" in sentence


def test_an_engine_does_not_go_on_after_a_batch_that_failed():
    failure, *after_it, loss, again, evaluation = run_on_ranks(1, after_a_failure)[0]
    assert "ArithmeticError: the layer is in trouble" in failure
    assert "the loss needs no gradient" in loss
    assert all("restart the run" in message for message in (*after_it, again, evaluation))
