"""bf16 with fp32 master weights is as close to fp32 as stock DeepSpeed's, however gradients accumulate."""

from itertools import product

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param

import ds_lgamp
from ds_lgamp.partition import shards
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.models import Training, pipeline_module, scaled_weights
from tests.integrations.deepspeed.running import Layout, batches, gathered

TRAINING = Training(blocks=5, tuples=False, steps=5)
FP32 = {}
BF16 = {"bf16": {"enabled": True}}
BF16_FP32 = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
STOCK = Layout(2, 2, 1, None)


def engine_of(layout, precision):
    ds_lgamp.install()
    with quiet():
        module = pipeline_module(TRAINING, layout.pipeline_ranks)
        scaled_weights(module.named_parameters())
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 0,
            "zero_optimization": {"stage": layout.stage, "reduce_bucket_size": 1000},
            "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True, "eps": 1e-4}},
            **precision,
            **({} if layout.block is None else {"ds_lgamp": layout.block}),
        }
        return deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)[0]


def train(layout, precision):
    """Trains. Returns losses, the (master) weights after every step by global name, and the parameters' types, of this
    rank."""
    engine = engine_of(layout, precision)
    losses, weights = [], []
    for step in range(TRAINING.steps):
        losses.append(engine.train_batch(batches(step, engine)).item())
        weights.append(master_weights(engine))
    return losses, weights, {str(parameter.dtype) for parameter in engine.module.parameters()}


def master_weights(engine):
    partition = getattr(engine.optimizer, "partition", None)
    if partition is not None:
        return {name: value.float() for name, value in gathered(partition, lambda each: each.master.values).items()}
    return {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in engine.module.named_parameters()}


def run_all():
    """Runs this rank's trainings. Returns them by (stage or stock, precision, accumulation)."""
    prepare_rank()
    runs = {"reference": train(STOCK, FP32)}
    for accumulation, precision in (("bf16", BF16), ("fp32", BF16_FP32)):
        runs["stock", accumulation] = train(STOCK, precision)
        for stage, group in product(range(4), ("all", 3)):
            layout = Layout(2, 2, stage, {"micro_batch_group": group})
            runs[stage, group, accumulation] = train(layout, precision)
    runs["hook"] = train_with_hooks()
    overflows = {name: step_that_overflows(precision) for name, precision in OVERFLOWS.items()}
    loaded = {
        (stage, name): weights_loaded_in_training(stage, precision)
        for stage in range(4)
        for name, precision in (("fp32", FP32), ("bf16", BF16))
    }
    return runs, overflows, loaded


def weights_loaded_in_training(stage, precision):
    """Loads a state into an engine that has trained.

    Returns whether its master weights equal the state, and the losses of both engines on the same batch.
    """
    first, second = (engine_of(Layout(2, 2, stage, {}), precision) for _ in range(2))
    for engine, count in ((first, 2), (second, 1)):
        for step in range(count):
            engine.train_batch(batches(step, engine))
    state = first.module.state_dict()
    second.module.load_state_dict(state)
    same = all(torch.equal(value, state[name].float()) for name, value in master_weights(second).items())
    return same, [engine.train_batch(batches(5, engine)).item() for engine in (first, second)]


WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01}}}
OVERFLOWS = {
    "checked": {**BF16, **WARMUP},
    "unchecked": {"bf16": {"enabled": True, "check_grad_overflow": False}, **WARMUP},
}


def step_that_overflows(precision):
    """Runs steps with a finite, an infinite and a finite loss.

    Returns for each whether it was applied, the skipped steps, the learning rate, and whether the weights stayed.
    """
    engine = engine_of(Layout(2, 2, 3, {}), precision)
    loss_fn = engine.module.loss_fn
    history = []
    for step, factor in enumerate((1.0, float("inf"), 1.0)):
        engine.module.loss_fn = lambda outputs, labels, factor=factor: loss_fn(outputs, labels) * factor
        before = master_weights(engine)
        engine.train_batch(batches(step, engine))
        stayed = all(torch.equal(before[name], value) for name, value in master_weights(engine).items())
        history.append((engine.was_step_applied(), engine.skipped_steps, engine.get_lr()[0], stayed))
    return history


def train_with_hooks():
    """Trains as with torch before 2.13, where a gradient has the dtype of its parameter."""
    shards.ACCUMULATES_IN_OTHER_DTYPES = False
    try:
        return train(Layout(2, 2, 3, {}), BF16_FP32)
    finally:
        shards.ACCUMULATES_IN_OTHER_DTYPES = True


@pytest.fixture(scope="module")
def ranks():
    return run_on_ranks(4, run_all)


@pytest.fixture(scope="module")
def runs(ranks):
    return merged([runs for runs, _, _ in ranks])


def merged(ranks):
    """Merges the ranks: losses and the weights of all layers. Stages of stock and of a block hold different layers."""
    return {
        key: (
            ranks[0][key][0],
            [{k: v for rank in ranks for k, v in rank[key][1][step].items()} for step in range(TRAINING.steps)],
            set().union(*(rank[key][2] for rank in ranks)),
        )
        for key in ranks[0]
    }


def distances(run, reference):
    """Returns the distance of the weights from the reference's after every step."""
    return [
        torch.stack([(weights[name] - expected[name]).norm() for name in expected]).norm().item()
        for weights, expected in zip(run[1], reference[1])
    ]


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", ["bf16", "fp32"])
@pytest.mark.parametrize("group", ["all", 3])
@pytest.mark.parametrize("stage", range(4))
def test_bf16_is_as_close_to_fp32_as_stock_is(runs, stage, group, accumulation):
    ours = distances(runs[stage, group, accumulation], runs["reference"])
    stock = distances(runs["stock", accumulation], runs["reference"])
    assert all(distance <= 1.2 * limit for distance, limit in zip(ours, stock))
    # The error of a single step's loss is random, so this compares all steps together.
    reference = runs["reference"][0]
    errors = [
        sum((loss - expected) ** 2 for loss, expected in zip(runs[key][0], reference)) ** 0.5
        for key in ((stage, group, accumulation), ("stock", accumulation))
    ]
    assert errors[0] <= 1.2 * errors[1]
    assert runs[stage, group, accumulation][2] == {"torch.bfloat16"}


@pytest.mark.slow
def test_accumulation_by_hooks_gives_the_same_bits(runs):
    assert runs["hook"][0] == runs[3, "all", "fp32"][0]
    for hooked, direct in zip(runs["hook"][1], runs[3, "all", "fp32"][1]):
        assert all(torch.equal(hooked[name], direct[name]) for name in direct)


@pytest.mark.slow
def test_a_step_whose_gradient_overflows_is_skipped_on_all_ranks(ranks):
    for _, history, _ in ranks:
        first, overflow, after = history["checked"]
        assert first[:2] == (True, 0) and not first[3]
        assert overflow == (False, 1, first[2], True), "weights and learning rate stay"
        assert after[:2] == (True, 1) and not after[3]
        assert history["unchecked"][1][:2] == (True, 0)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_training_goes_on_from_weights_that_are_loaded_into_the_module(ranks, stage, precision):
    for _, _, loaded in ranks:
        same, (first, second) = loaded[stage, precision]
        assert same and first == second
