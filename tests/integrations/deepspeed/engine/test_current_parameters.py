"""Between steps, parameters at stages 0 to 2 have the values of one process. With deferred gathers and at stage 3,
reading one raises an error."""

import io
from functools import cache

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ds_lgamp.partition.guard import NotGatheredError
from ds_lgamp.runtime.measure import CollectiveCounter
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.tensor_reading import (
    BF16,
    FP32,
    detached,
    engine_of,
    named,
    over_data_ranks,
    read,
)
from tests.integrations.deepspeed.engine.tensor_reading import TRAINING as WITH_CLIPPING
from tests.integrations.deepspeed.models import train_reference
from tests.integrations.deepspeed.running import batches
from tests.slow import slow_except

TRAINING = WITH_CLIPPING._replace(clipping=0.0)
STEPS = 3
DEFERRED = {"defer_gathers": True}
GRIDS = [(1, 2), (2, 2), (2, 1)]
"""Pipeline ranks and data-parallel ranks."""
CASES = [*((stage, {}) for stage in range(4)), (1, DEFERRED), (2, DEFERRED), (3, DEFERRED)]
DECAY = 0.5


def training_engine(pipeline_ranks, stage, precision=FP32, block=None, hook=None):
    return engine_of(pipeline_ranks, stage, precision, clipping=0.0, block=block, hook=hook)


def refusals(parameters):
    """Returns by name the error of reading each parameter."""
    refused = {}
    for name, parameter in parameters.items():
        with pytest.raises(NotGatheredError) as error:
            parameter.clone()
        refused[name] = str(error.value)
    return refused


def last_collectives(pipeline_ranks, stage):
    """Returns the last collectives of a step: as many as it launches gathers behind itself, and one more."""
    prepare_rank()
    engine = training_engine(pipeline_ranks, stage)
    engine.train_batch(batches(0, engine))
    with CollectiveCounter() as counter:
        engine.train_batch(batches(1, engine))
    units = [unit for unit in engine.optimizer.partition.units if unit.trains]
    return [kind for kind, _ in counter.log[-len(units) - 1 :]]


@pytest.mark.parametrize("stage", [1, 2])
def test_the_loss_does_not_wait_for_the_gathers_behind_its_step(stage):
    for before, *behind in run_on_ranks(4, last_collectives, 2, stage):
        assert before != "all_gather"
        assert set(behind) == {"all_gather"}


def trained(pipeline_ranks, stage, block):
    """Trains.

    Returns for every step the loss, the parameters or the errors of reading them, and their values in a block. Also
    returns the losses of a run that reads nothing.
    """
    engine = training_engine(pipeline_ranks, stage, block=block)
    told = []
    for step in range(STEPS):
        loss = engine.train_batch(batches(step, engine)).item()
        kinds = {type(parameter) for parameter in engine.module.parameters()}
        seen = lacking(engine)
        refused = refusals(named(engine)) if seen is None else None
        with deepspeed.zero.GatheredParameters(engine.module.parameters()):
            inside = detached(named(engine))
        told.append((loss, kinds == {nn.Parameter}, seen, refused, inside))
    other = training_engine(pipeline_ranks, stage, block=block)
    return told, [other.train_batch(batches(step, other)).item() for step in range(STEPS)]


def lacking(engine):
    """Returns the values of parameters, or None if reading them is refused."""
    try:
        return detached(named(engine))
    except NotGatheredError:
        return None


def first_batches(pipeline_ranks, stage, block):
    """Returns whether values can be read before the first step, after an evaluation, and after a step with an
    evaluation.

    Also returns whether a gather began before the first step.
    """
    engine = training_engine(pipeline_ranks, stage, block=block)
    readable = [lacking(engine) is not None]
    engine.eval_batch(batches(0, engine))
    moved = any(unit.storage.gathering is not None for unit in engine.optimizer.partition.units)
    readable.append(lacking(engine) is not None)
    engine.train_batch(batches(0, engine))
    engine.eval_batch(batches(1, engine))
    readable.append(lacking(engine) is not None)
    return readable, moved


def averaged(pipeline_ranks):
    """Averages a layer's weights over the steps with torch, which first copies the layer.

    Returns the average, a saved state after each step, and whether the copy has ordinary parameters.
    """
    engine = training_engine(pipeline_ranks, 2)
    index, layer = next((name, each) for name, each in engine.module.named_children() if name.isdecimal())
    average, states = None, []
    for step in range(STEPS):
        engine.train_batch(batches(step, engine))
        if step == 0:
            average = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        average.update_parameters(layer)
        torch.save(layer.state_dict(), file := io.BytesIO())
        file.seek(0)
        states.append({f"{index}.{name}": each for name, each in torch.load(file).items()})
    values = {f"{index}.{name}": each.detach() for name, each in average.module.named_parameters()}
    return values, states, {type(each) for each in average.parameters()} == {nn.Parameter}


def loaded(pipeline_ranks, stage, precision, block, folder):
    """Returns the parameters when they were saved, and after each kind of load, without communication between ranks.

    The loads are: the checkpoint into the engine that went on, the checkpoint into a fresh engine, a state of the
    optimizer, and a state of the module.
    """
    engine = training_engine(pipeline_ranks, stage, precision, block)
    for step in range(2):
        engine.train_batch(batches(step, engine))
    engine.save_checkpoint(str(folder))
    state, whole = engine.optimizer.state_dict(), engine.module.state_dict()
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        saved = detached(named(engine))
    again = {}
    fresh = training_engine(pipeline_ranks, stage, precision, block)
    for each, name in ((engine, "the same engine"), (fresh, "a fresh engine")):
        each.train_batch(batches(2, each))
        each.load_checkpoint(str(folder))
        again[name] = detached(named(each))
    # DeepSpeed's tests compare two engines in this way.
    for (name, own), (_, other) in zip(engine.module.named_parameters(), fresh.module.named_parameters()):
        assert torch.allclose(own, other, atol=1e-07), name
    engine.train_batch(batches(2, engine))
    engine.optimizer.load_state_dict(state)
    again["the optimizer's"] = detached(named(engine))
    engine.train_batch(batches(2, engine))
    engine.module.load_state_dict(whole)
    again["the module's"] = detached(named(engine))
    return saved, again


def around_the_step(pipeline_ranks, stage, precision):
    """Reads in a hook behind the optimizer's step, and behind a step that user code wraps.

    Returns the errors, the values in a block there, and the values afterwards.
    """
    refused, inside = [], {}

    def look(*_):
        refused.append(refusals(named(engine)))

    engine = training_engine(pipeline_ranks, stage, precision, hook=look)

    def wrapped():
        step()
        look()
        with deepspeed.zero.GatheredParameters(engine.module.parameters()):
            inside.update(detached(named(engine)))

    step, engine.optimizer.step = engine.optimizer.step, wrapped
    engine.train_batch(batches(0, engine))
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        return refused, inside, detached(named(engine))


def written(pipeline_ranks, stage, precision):
    """Returns pairs that must be equal after user code wrote to parameters right behind a step."""
    engine = training_engine(pipeline_ranks, stage, precision)
    pairs = []
    engine.train_batch(batches(0, engine))
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.fill_(0.25)
    engine.optimizer.refresh_fp32_params()
    masters = read(safe_get_full_fp32_param, engine)
    pairs.append((masters, {name: torch.full_like(value, 0.25) for name, value in masters.items()}))
    engine.train_batch(batches(1, engine))
    values = {}
    for index, (name, parameter) in enumerate(named(engine).items()):
        values[name] = torch.full(parameter.ds_shape, 0.5 + index)
        safe_set_full_fp32_param(parameter, values[name])
    pairs.append(({name: value.float() for name, value in detached(named(engine)).items()}, values))
    pairs.append((read(safe_get_full_fp32_param, engine), values))
    engine.train_batch(batches(2, engine))
    first, *others = over_data_ranks(engine, detached(named(engine)))
    return [*pairs, *((first, other) for other in others)]


def replaced(pipeline_ranks):
    """Replaces the optimizer's step together with its hooks. Returns the parameters after it, and their expected
    values."""
    engine = training_engine(pipeline_ranks, 1, BF16)
    optimizer = engine.optimizer.optimizer

    def step():
        with torch.no_grad():
            for group in optimizer.param_groups:
                for shard in group["params"]:
                    shard.fill_(0.5)

    optimizer.step = step
    engine.train_batch(batches(0, engine))
    values = detached(named(engine))
    return values, {name: torch.full_like(value, 0.5) for name, value in values.items()}


def overflowed(pipeline_ranks):
    """Runs a skipped step and an applied one. Returns for each the skipped steps, and whether a unit gathers or has old
    values."""
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 32, "hysteresis": 1, "loss_scale_window": 1000}}
    engine = training_engine(pipeline_ranks, 2, fp16)
    told = []
    for step in range(2):
        engine.train_batch(batches(step, engine))
        storages = [unit.storage for unit in engine.optimizer.partition.units]
        told.append((engine.skipped_steps, any(each.gathering is not None or each.stale for each in storages)))
        engine.optimizer.override_loss_scale(128.0)
    return told


def run_all(pipeline_ranks, data_ranks, folder):
    prepare_rank()
    # torch computes fp16 on any CPU, but DeepSpeed's CPU accelerator reports it only with oneDNN.
    get_accelerator().is_fp16_supported = lambda: True
    told = {"trained": [trained(pipeline_ranks, *case) for case in CASES]}
    if data_ranks == 1:
        return told
    return {
        **told,
        "first": [first_batches(pipeline_ranks, *case) for case in CASES],
        "averaged": averaged(pipeline_ranks),
        "loaded": [
            loaded(pipeline_ranks, stage, precision, block, folder / f"{number}")
            for number, (stage, precision, block) in enumerate(LOADING)
        ],
        "around": [around_the_step(pipeline_ranks, stage, each) for stage in (1, 3) for each in (FP32, BF16)],
        "written": [written(pipeline_ranks, stage, each) for stage in (1, 2) for each in (FP32, BF16)],
        "replaced": replaced(pipeline_ranks),
        "overflowed": overflowed(pipeline_ranks),
    }


LOADING = [(0, FP32, {}), (1, FP32, {}), (1, BF16, {}), (2, FP32, DEFERRED)]


@pytest.fixture(
    scope="module", params=slow_except([], GRIDS, slow=[(1, 2), (2, 1)]), ids=lambda grid: "P{}W{}".format(*grid)
)
def ranks(request, tmp_path_factory):
    pipeline_ranks, data_ranks = request.param
    folder = tmp_path_factory.mktemp("checkpoints")
    return data_ranks, run_on_ranks(pipeline_ranks * data_ranks, run_all, pipeline_ranks, data_ranks, folder)


@cache
def reference(data_ranks, steps):
    return train_reference(TRAINING._replace(steps=steps), data_ranks)


def assert_equal(ours, expected):
    assert ours.keys() == expected.keys()
    for name in ours:
        assert torch.equal(ours[name], expected[name]), name


def assert_close(ours, expected):
    assert ours
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=1e-4, atol=1e-6)


def of(ranks, what):
    data_ranks, told = ranks
    if what not in told[0]:
        pytest.skip("one data-parallel rank has all values")
    return [rank[what] for rank in told]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{stage} {block}" for stage, block in CASES])
def test_after_every_step_parameters_are_current_or_say_that_they_are_not(ranks, number):
    (stage, block), (data_ranks, _) = CASES[number], ranks
    readable = data_ranks == 1 or stage == 0 or (stage < 3 and not block)
    for rank in of(ranks, "trained"):
        told, losses = rank[number]
        assert [loss for loss, *_ in told] == losses
        for step, (_, ordinary, seen, refused, inside) in enumerate(told, 1):
            expected = reference(data_ranks, step).parameters
            assert_close(inside, expected)
            assert ordinary == (data_ranks == 1 or stage == 0) and (seen is not None) == readable
            if readable:
                assert_equal(seen, inside)
                continue
            for name, sentence in refused.items():
                lacks = "has no elements" if stage == 3 else "has old values"
                assert sentence.startswith(f"parameter {name} {lacks} on this rank") and "\n" not in sentence
                for way in ("zero.GatheredParameters", "safe_get_full_fp32_param", "engine.module.state_dict()"):
                    assert way in sentence


def test_losses_are_the_same_to_the_bit_however_parameters_are_gathered(ranks):
    for rank in of(ranks, "trained"):
        by_stage = {}
        for (stage, _), (_, losses) in zip(CASES, rank):
            by_stage.setdefault(stage, []).append(losses)
        assert by_stage[1][0] == by_stage[1][1] and by_stage[2][0] == by_stage[2][1]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{stage} {block}" for stage, block in CASES])
def test_before_the_first_step_and_after_evaluations_nothing_is_old(ranks, number):
    for rank in of(ranks, "first"):
        readable, moved = rank[number]
        assert readable == [CASES[number][0] < 3] * 3 and not moved


def test_averages_copies_and_saved_states_hold_what_was_current(ranks):
    for values, states, ordinary in of(ranks, "averaged"):
        parameters = [reference(2, step).parameters for step in range(1, STEPS + 1)]
        for state, expected in zip(states, parameters):
            assert_close(state, expected)
        for name, value in values.items():
            expected = parameters[0][name].detach()
            for after in parameters[1:]:
                expected = DECAY * expected + (1 - DECAY) * after[name].detach()
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)
        assert ordinary


def test_what_was_loaded_can_be_read_at_once(ranks):
    for rank in of(ranks, "loaded"):
        for saved, again in rank:
            for values in again.values():
                assert_equal(values, saved)


def test_behind_the_update_parameters_are_refused_until_they_are_gathered(ranks):
    for rank in of(ranks, "around"):
        for refused, inside, after in rank:
            assert len(refused) == 2 and all(set(each) == set(after) for each in refused)
            assert_equal(inside, after)


def test_what_is_written_behind_a_step_is_what_training_goes_on_with(ranks):
    for rank in of(ranks, "written"):
        for pairs in rank:
            for pair in pairs:
                assert_equal(*pair)


def test_a_step_that_user_code_replaced_is_followed_too(ranks):
    for pair in of(ranks, "replaced"):
        assert_equal(*pair)


def test_a_skipped_step_leaves_nothing_to_gather(ranks):
    for told in of(ranks, "overflowed"):
        assert told == [(1, False), (1, True)]
