"""What scripts call and set on stock DeepSpeed's engine and its optimizer has the same effect with a block, or is
refused in a sentence."""

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad
from torch import nn

import ds_lgamp
from ds_lgamp.config import ConfigError
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.linear import batches, build, engine_of, linears

LOW, HIGH = 0.01, 0.5
"""Limits of the gradient's norm."""


class Loss(nn.Module):
    def forward(self, inputs):
        return inputs.square().mean()


def plain_engine(block, stage, micro_batches=2, **settings):
    """The engine of a plain script."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Loss())
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": micro_batches,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **({} if block is None else {"ds_lgamp": block}),
        **settings,
    }
    ds_lgamp.install()
    with quiet():
        return deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[
            0
        ]


def inputs_of(step, count=2):
    return [inputs for inputs, _ in batches(count, start=2 * step + dist.get_rank())]


def train(engine, step):
    for inputs in inputs_of(step):
        engine.backward(engine(inputs))
        engine.step()
    return float(engine.get_global_grad_norm())


def change_limit_and_rate(block, stage):
    """Returns the norm of the gradient in each step; it depends on what the step before has changed."""
    engine = plain_engine(block, stage, gradient_clipping=LOW)
    limits, norms = [engine.optimizer.clip_grad], [train(engine, 0)]
    engine.optimizer.clip_grad = HIGH
    norms += [train(engine, 1), train(engine, 2)]
    engine.optimizer.set_lr(3 * engine.optimizer.get_lr())
    return limits, norms + [train(engine, 3), train(engine, 4)], engine.get_lr()


def change_limit_of_pipeline(block, stage):
    engine = engine_of(build(linears(4)), block, stage, gradient_clipping=LOW)
    losses = [engine.train_batch(batches(2)).item()]
    engine.optimizer.clip_grad = HIGH
    return losses + [engine.train_batch(batches(2, start=step)).item() for step in (1, 2)]


def coalesce(block, stage):
    """Each step has other micro-batches than the configuration says. Returns the norms of its gradients."""
    engine = plain_engine(block, stage, micro_batches=1)
    norms = []
    for step in range(2):
        with engine.coalesce_grad_reduction():
            for inputs in inputs_of(step, count=3):
                engine.backward(engine(inputs))
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms, engine.global_steps


def double_weights(block, stage):
    engine = plain_engine(block, stage)
    train(engine, 0)
    shared = [engine.module_state_dict()]
    dist.broadcast_object_list(shared)
    before = {name: value.sum().item() for name, value in shared[0].items()}
    engine.load_module_state_dict({"module": {name: 2 * value for name, value in shared[0].items()}})
    return before, train(engine, 1)


def halve_gradients(block, stage):
    """Halves a gradient in the place of the optimizer's step, after losses that the script has multiplied.
    Returns what it sees there, and the norms."""
    engine = plain_engine(block, stage)
    step, weight, numbers = engine.optimizer.step, engine.module[0].weight, []

    def halving_step(*arguments, **options):
        gradient = safe_get_full_grad(weight)
        numbers.append(gradient.norm().item())
        safe_set_full_grad(weight, gradient / 2)
        return step(*arguments, **options)

    engine.optimizer.step = halving_step
    for factor, by_micro_batches in ((3, True), (1, False)):
        for inputs in inputs_of(factor):
            engine.backward(factor * engine(inputs), scale_wrt_gas=by_micro_batches)
            engine.step()
        numbers.append(float(engine.get_global_grad_norm()))
    return numbers


def refused(evaluates):
    """Returns what is said of calls that would have other effects than in stock DeepSpeed."""
    pipeline, plain = engine_of(build(linears(4)), {}), plain_engine({}, 3)
    updates_early = engine_of(build(linears(4)), {"overlap_update": True}, gradient_clipping=0.0)
    plain.backward(plain(inputs_of(0)[0]))
    plain.step()
    said = []
    for mistake in (
        lambda: pipeline.set_train_batch_size(0),
        lambda: pipeline.set_train_batch_size(6),
        lambda: plain.set_train_batch_size(32),
        pipeline.offload_states,
        plain.offload_states,
        lambda: pipeline.save_16bit_model("weights"),
        lambda: setattr(updates_early.optimizer, "clip_grad", 1.0),
        lambda: evaluates._configure_optimizer(torch.optim.SGD, plain.module.parameters()),
    ):
        with pytest.raises(ConfigError) as error:
            mistake()
        said.append(str(error.value))
    pipeline.reload_states()
    updates_early.optimizer.clip_grad = 0.0
    return said


BESIDE_STOCK = {
    change_limit_and_rate: (1, 3),
    coalesce: (1, 3),
    double_weights: (1,),
    halve_gradients: (1,),
    # Last: its pipeline comes after all plain engines.
    change_limit_of_pipeline: (1,),
}


def run_all():
    prepare_rank()
    with quiet():
        # First: a plain engine of stock DeepSpeed is not built after a pipeline.
        evaluates = deepspeed.initialize(model=Loss(), config={"train_batch_size": 2, "ds_lgamp": {}})[0]
    runs = {
        (function.__name__, stage): [function(block, stage) for block in (None, {})]
        for function, stages in BESIDE_STOCK.items()
        for stage in stages
    }
    return runs, refused(evaluates)


@pytest.fixture(scope="module")
def ranks():
    return run_on_ranks(2, run_all)


def near(value):
    if isinstance(value, tuple | list):
        return type(value)(map(near, value))
    return pytest.approx(value, rel=1e-4)


def beside_stock(ranks, function):
    for runs, _ in ranks:
        for stage in BESIDE_STOCK[function]:
            stock, layered = runs[function.__name__, stage]
            assert layered == near(stock)


def test_a_limit_of_the_norm_and_a_rate_that_the_script_sets_are_those_of_the_next_step(ranks):
    beside_stock(ranks, change_limit_and_rate)


def test_a_limit_of_the_norm_of_a_pipeline_is_that_of_the_next_step(ranks):
    beside_stock(ranks, change_limit_of_pipeline)


def test_micro_batches_whose_reduction_is_coalesced_are_one_step(ranks):
    beside_stock(ranks, coalesce)


def test_the_model_state_of_the_engine_is_read_and_loaded(ranks):
    beside_stock(ranks, double_weights)


def test_gradients_in_the_place_of_the_step_have_the_factor_of_the_script(ranks):
    beside_stock(ranks, halve_gradients)


def test_what_would_do_something_else_is_refused(ranks):
    words = (
        "train_batch_size is 0, but 1 ranks with micro-batches of 4 make multiples of 4; use one of them",
        "train_batch_size is 6, but 1 ranks with micro-batches of 4 make multiples of 4",
        "set_train_batch_size is called after 1 micro-batches of a batch, whose losses were divided by 2; call it",
        "engine.offload_states is called, but with a ds_lgamp block states move to the host only",
        "engine.offload_states is called",
        "use engine.save_checkpoint and ds_lgamp checkpoint export, or torch.save(engine.module.state_dict(), ...)",
        "engine.optimizer.clip_grad is set to 1, but gradient_clipping is 0 and chunks are updated as",
        "engine._configure_optimizer is called, but with a ds_lgamp block only the engine of a PipelineModule gets",
    )
    for _, said in ranks:
        for wanted, message in zip(words, said, strict=True):
            assert wanted in message
