"""With ``overlap_update`` and clipping, updates are left to the next step. Whoever needs their results gets them."""

from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.engine.updates import Updates
from ds_lgamp.partition.guard import NotGatheredError
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed import linear
from tests.integrations.deepspeed.engine.tensor_reading import BF16, MOMENTUM, detached, engine_of, named, read
from tests.integrations.deepspeed.running import batches

OVERLAP = {"overlap_update": True}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """What the tests that are not slow look at, by rank, from one start of ranks."""
    by_rank = run_on_ranks(2, prepared, do_all, tmp_path_factory.mktemp("pending"))
    return {name: [found[name] for found in by_rank] for name in by_rank[0]}


def prepared(function, *arguments):
    prepare_rank()
    return function(*arguments)


def do_all(folder):
    return {
        "readers": read_after_steps(2, BF16),
        "parameters": [parameters_between_steps(stage) for stage in (0, 2)],
        "watched": watched_steps(),
        "orders": [order_of_updates(2, clipping) for clipping in (0.0, 0.5)],
        "checkpoint": interrupted(folder, (OVERLAP, {})),
        "counting": counting_optimizer(),
    }


def step(engine, number=0):
    return engine.train_batch(batches(number, engine)).item()


def pending(engine):
    return [unit.name for unit in engine.optimizer.partition.units if unit.storage.is_overdue]


def in_block(engine):
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        return detached(named(engine))


def tripled(engine):
    for parameter in engine.module.parameters():
        safe_set_full_fp32_param(parameter, 3 * safe_get_full_fp32_param(parameter))
    return {"loss": torch.tensor(step(engine, 1))}


def reloaded(engine):
    """Loads the state of the module, and of the optimizer, that the engine has."""
    state, optimizer = engine.module.state_dict(), engine.optimizer.state_dict()
    step(engine, 1)
    engine.module.load_state_dict(state)
    engine.optimizer.load_state_dict(optimizer)
    return {"loss": torch.tensor([step(engine, number) for number in (2, 3)])}


def inferred(engine):
    """The update under way makes the optimizer's state, which later steps change."""
    with torch.inference_mode():
        loss = engine.eval_batch(batches(5, engine))
    return {"loss": loss.clone(), "next": torch.tensor(step(engine, 1))}


def states(engine):
    shards = [shard for group in engine.optimizer.param_groups for shard in group["params"]]
    return {str(index): engine.optimizer.state[shard][MOMENTUM] for index, shard in enumerate(shards)}


def states_of_torch(engine):
    state = engine.optimizer.optimizer.state_dict()["state"]
    return {str(index): values[MOMENTUM] for index, values in state.items()}


READERS = {
    "evaluation in inference mode": inferred,
    "a block": in_block,
    "weights": lambda engine: read(safe_get_full_fp32_param, engine),
    "states": lambda engine: read(safe_get_full_optimizer_state, engine, MOMENTUM),
    "state_dict": lambda engine: {name: value.clone() for name, value in engine.module.state_dict().items()},
    "states of shards": states,
    "states of torch": states_of_torch,
    "evaluation": lambda engine: {"loss": engine.eval_batch(batches(5, engine)).clone()},
    "writing": tripled,
    "loading": reloaded,
}
"""Ways to read what the last step did. The first access to it is the reader's."""


def read_after_steps(stage, precision):
    """Returns the differences between engines with and without overlap, by reader."""
    engines = [engine_of(1, stage, precision, block=block) for block in ({}, OVERLAP)]
    different = []
    for number, (name, reader) in enumerate(READERS.items()):
        losses = [step(engine, number) for engine in engines]
        assert not pending(engines[0]) and pending(engines[1]), name
        plain, overlapped = (reader(engine) for engine in engines)
        same = plain.keys() == overlapped.keys() and all(torch.equal(plain[key], overlapped[key]) for key in plain)
        if losses[0] != losses[1] or not same:
            different.append(name)
    return different


def test_readers_see_the_finished_step(on_two_ranks):
    assert on_two_ranks["readers"] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_readers_see_the_finished_step_at_every_stage(stage):
    assert run_on_ranks(2, prepared, read_after_steps, stage, {} if stage % 2 else BF16) == [[], []]


def parameters_between_steps(stage):
    """Returns whether reading any parameter itself after a step is refused, or gives the values of a plain step."""
    plain, overlapped = (engine_of(1, stage, block=block) for block in ({}, OVERLAP))
    for engine in (plain, overlapped):
        step(engine)
    expected = in_block(plain)
    found = []
    for name, parameter in named(overlapped).items():
        try:
            found.append("current" if torch.equal(parameter.detach(), expected[name]) else "old")
        except NotGatheredError:
            found.append("refused")
    return set(found)


def test_a_parameter_is_current_or_refused(on_two_ranks):
    assert on_two_ranks["parameters"] == [[{"current"}, {"refused"}]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_is_refused_at_other_stages(stage):
    assert run_on_ranks(2, prepared, parameters_between_steps, stage) == [{"refused"}] * 2


def watched_steps():
    """Returns how often a user's hook runs, and what the wrapped step of the engine's optimizer sees of gradients."""
    counts = []
    engine = engine_of(1, 1, block=OVERLAP, hook=lambda *_: counts.append(len(pending(engine))))
    steps = [step(engine, number) for number in range(2)]
    plain = engine_of(1, 1)
    assert steps == [step(plain, number) for number in range(2)]
    assert all(torch.equal(value, in_block(plain)[name]) for name, value in in_block(engine).items())
    return counts


def test_user_code_around_the_optimizers_step_sees_one_step_of_all_chunks(on_two_ranks):
    assert on_two_ranks["watched"] == [[0, 0]] * 2


def order_of_updates(stage, clipping):
    """Returns the actions of the second step with the names of the units that each updates."""
    engine = engine_of(1, stage, clipping=clipping, block=OVERLAP)
    step(engine)
    executor, log = engine.lgamp.executor, []
    execute, update = executor.execute, Updates.update

    def logged_action(action):
        log.append(str(action))
        execute(action)

    executor.execute = logged_action

    def logged(self, units):
        log.extend(f"[{unit.name}]" for unit in units)
        update(self, units)

    Updates.update = logged
    step(engine, 1)
    Updates.update = update
    kept = ("UPDATE", "WAIT_REDUCE", "GATHER", "STEP", "[")
    return [text for text in log if text.startswith(kept) or text in ("F0.0", "F1.0", "F2.0")]


def test_an_update_precedes_the_wait_for_the_reductions_of_lower_chunks(on_two_ranks):
    """The tied unit has several users: the step updates it."""
    order, _ = on_two_ranks["orders"][0]
    chunks = [f"WAIT_REDUCE{chunk} UPDATE{chunk} [chunk {chunk}]" for chunk in reversed(range(6))]
    gathers = [f"GATHER{chunk}" for chunk in range(6)]
    assert " ".join(order) == " ".join(["F0.0 F1.0 F2.0", *chunks, "STEP [tied embedding]", *gathers])


def test_a_postponed_update_precedes_the_gather_of_its_chunk(on_two_ranks):
    _, order = on_two_ranks["orders"][0]
    ahead = [f"UPDATE{chunk} [chunk {chunk}] GATHER{chunk}" for chunk in range(1, 6)]
    first = "UPDATE0 [chunk 0] [tied embedding] GATHER0"
    visits = [first, ahead[0], "F0.0", ahead[1], "F1.0", ahead[2], "F2.0", *ahead[3:]]
    waits = [f"WAIT_REDUCE{chunk}" for chunk in reversed(range(6))]
    assert " ".join(order) == " ".join([*visits, *waits, "STEP"])


def interrupted(folder, blocks):
    """Trains, saves after two steps and goes on; loads into another engine and goes on. Returns the losses of both."""
    first, second = (engine_of(1, 2, BF16, block=block) for block in blocks)
    for number in range(2):
        step(first, number)
        step(second, 7 + number)
    first.save_checkpoint(str(folder))
    second.load_checkpoint(str(folder))
    first.wait_for_checkpoint()
    return [[step(engine, number) for number in range(2, 4)] for engine in (first, second)]


def test_a_checkpoint_between_steps_holds_the_finished_step(on_two_ranks):
    for first, second in on_two_ranks["checkpoint"]:
        assert first == second


@pytest.mark.slow
def test_a_run_with_pending_updates_loads_another_checkpoint(tmp_path: Path):
    for first, second in run_on_ranks(2, prepared, interrupted, tmp_path, ({}, OVERLAP)):
        assert first == second


class Counting(torch.optim.SGD):
    """Might keep a number per step."""


def counting_optimizer():
    module = linear.build(linear.linears())
    optimizer = Counting(module.parameters(), lr=0.1)
    with pytest.raises(ConfigError) as refused:
        linear.engine_of(module, OVERLAP, optimizer=optimizer, zero_allow_untested_optimizer=True)
    return str(refused.value)


def test_an_optimizer_that_may_count_steps_is_refused(on_two_ranks):
    for refused in on_two_ranks["counting"]:
        assert refused.startswith("ds_lgamp.overlap_update is true, but ") and "Counting may count a step" in refused
