"""An optimizer that skips a step on the device: the host learns of the overflow one step late and waits for nothing."""

from copy import deepcopy

import pytest
import torch

from ds_lgamp.integrations.deepspeed.config.optimizer_choice import skips_by_itself
from ds_lgamp.integrations.deepspeed.engine.nonfinite import LateFlag
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.linear import batches, build, engine_of, linears

OPTIMIZERS = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam, "Adagrad": torch.optim.Adagrad}
FINITE, INFINITE = 1.0, float("inf")
FACTORS = (FINITE, INFINITE, FINITE, FINITE)
"""Of the inputs of data-parallel rank 1, by step. The others are always finite."""
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01}}


def state_of(engine):
    """Master weights, weights, and the optimizer's state, which is None before the first step."""
    partition, optimizer = engine.optimizer.partition, engine.optimizer.optimizer
    partition.catch_up()
    masters = [unit.master.values.detach().clone() for unit in partition.units]
    shards = [unit.storage.shard.clone() for unit in partition.units]
    moments = [deepcopy(dict(optimizer.state[segment.shard])) for segment in partition.segments()]
    return masters, shards, moments


def train(name, stage, home, factors):
    """Returns the state after each step, and what the host knows: overflow, applied, skipped steps, learning rate."""
    module = build(linears(4))
    optimizer = OPTIMIZERS[name](module.parameters(), lr=0.01, fused=True)
    if home == "watched host":
        optimizer.register_step_pre_hook(lambda *_: None)
    zero = {} if home == "device" else {"offload_optimizer": {"device": "cpu"}}
    more = {"bf16": {"enabled": True}, "scheduler": WARMUP, "gradient_clipping": 0.1}
    engine = engine_of(module, {}, stage, optimizer, zero_optimization={"stage": stage, **zero}, **more)
    states, known = [], []
    for step, factor in enumerate(factors):
        own = factor if engine.grid.data_parallel_id == 1 else FINITE
        data = [((inputs * own).bfloat16(), labels) for inputs, labels in batches(2, start=step)]
        engine.train_batch(iter(data))
        states.append(state_of(engine))
        known.append((engine.optimizer.overflow, engine.was_step_applied(), engine.skipped_steps, engine.get_lr()[0]))
    return states, known


def run_all():
    prepare_rank()
    return {case: train(*case, FACTORS) for case in CASES}


CASES = [
    *(("AdamW", 0, "device"), ("AdamW", 3, "device"), ("Adam", 1, "device"), ("Adagrad", 2, "device")),
    *(("AdamW", 3, "host"), ("Adagrad", 1, "host"), ("Adam", 2, "watched host")),
]
"""Optimizers, ZeRO stages and homes of the optimizer's state."""


@pytest.fixture(scope="module")
def ranks():
    return run_on_ranks(4, run_all)


def same(one, other):
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_overflow_on_one_rank_changes_nothing_on_any(ranks, case):
    for rank in ranks:
        (first, overflowed, after, _), _ = rank[case]
        assert same(first[0], overflowed[0]) and same(first[1], overflowed[1]), "weights"
        for before, later in zip(first[2], overflowed[2], strict=True):
            assert before.keys() == later.keys() and same(before.values(), later.values()), "the optimizer's state"
        assert not same(overflowed[0], after[0]), "the next step updates"
        assert all(weights.isfinite().all() for weights in after[0])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_host_learns_of_it_one_step_late(ranks, case):
    for rank in ranks:
        _, known = rank[case]
        overflow, applied, skipped, rates = zip(*known)
        assert overflow == (False, False, True, False)
        assert applied == (True, True, False, True)
        assert skipped == (0, 0, 1, 1)
        assert rates[0] < rates[1] == rates[2] < rates[3], "the step that learns of it leaves the learning rate alone"


def interrupted(folder):
    """Trains a step that overflows, and two good ones. Returns what the host knows after the last: without a break,
    after a new engine has loaded what was saved behind the overflow, and after one has gone back to before it."""
    prepare_rank()
    known = []
    for moment in (None, 2, 1):
        engine = make()
        for step, factor in enumerate((FINITE, INFINITE, FINITE, FINITE), start=1):
            train_step(engine, step, factor)
            if moment == 1 == step:
                engine.save_checkpoint(folder, tag="before")
            if moment == 2 == step:
                engine.save_checkpoint(folder, tag="behind")
                engine = make()
                engine.load_checkpoint(folder, tag="behind")
            if moment == 1 and step == 2:
                engine.load_checkpoint(folder, tag="before")
        known.append((engine.global_steps, engine.skipped_steps, engine.get_lr()[0]))
    return known


def with_another_kernel(folder):
    """Goes on with the state of torch's plain kernel. Returns what the groups of the fused one say, and both losses."""
    prepare_rank()
    losses, groups = [], []
    for fused in (False, True):
        engine = make(fused)
        if fused:
            engine.load_checkpoint(folder)
            groups = [group["fused"] for group in engine.optimizer.param_groups]
        else:
            train_step(engine, 1, FINITE)
            engine.save_checkpoint(folder)
        losses.append([train_step(engine, step, FINITE) for step in (2, 3)])
    return groups, losses


def test_a_checkpoint_does_not_choose_the_kernel(tmp_path):
    for groups, (plain, fused) in run_on_ranks(2, with_another_kernel, str(tmp_path)):
        assert groups == [True] and fused == pytest.approx(plain, rel=1e-2)


def idle_beside_a_host():
    """Rank 0 trains nothing, and the host of rank 1 updates. Returns the learning rates and the skipped steps."""
    prepare_rank()
    module = build(linears(2))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith("0."))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    engine = engine_of(
        *(module, {"layers_per_chunk": 1}, 1, optimizer),
        bf16={"enabled": True},
        scheduler=WARMUP,
        zero_optimization=zero,
    )
    rates = []
    for step, factor in enumerate(FACTORS, start=1):
        train_step(engine, step, factor)
        rates.append(engine.get_lr()[0])
    return rates, engine.skipped_steps


def test_a_rank_that_trains_nothing_learns_of_an_overflow_when_the_others_do():
    idle, training = run_on_ranks(2, idle_beside_a_host)
    assert idle == training and idle[1] == 1
    rates = idle[0]
    assert rates[0] < rates[1] == rates[2] < rates[3], "the step that learns of it leaves the learning rate alone"


def make(fused=True):
    module = build(linears(4))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, fused=fused)
    return engine_of(module, {}, 3, optimizer, bf16={"enabled": True}, scheduler=WARMUP, gradient_clipping=0.1)


def train_step(engine, step, factor):
    data = [((inputs * factor).bfloat16(), labels) for inputs, labels in batches(2, start=step)]
    return engine.train_batch(iter(data)).item()


def test_a_checkpoint_knows_of_an_overflow_that_the_host_does_not_know_of_yet(tmp_path):
    for without_break, resumed, gone_back in run_on_ranks(2, interrupted, str(tmp_path)):
        assert resumed == without_break and without_break[:2] == (4, 1)
        assert gone_back[:2] == (3, 0), "what was left behind does not count"


def test_a_flag_is_known_at_the_next_exchange():
    flag = LateFlag(torch.device("cpu"))
    told = [flag.exchange(torch.tensor(value)) for value in (1.0, 0.0, 0.0, 1.0, 1.0)]
    assert told == [False, True, False, False, True]


def test_only_fused_kernels_that_skip_exactly_are_trusted():
    parameters = [torch.nn.Parameter(torch.ones(2))]
    assert skips_by_itself(torch.optim.AdamW(parameters, fused=True))
    assert not skips_by_itself(torch.optim.AdamW(parameters))
    assert not skips_by_itself(torch.optim.AdamW([{"params": parameters, "fused": False}], fused=True))
    assert not skips_by_itself(torch.optim.SGD(parameters, momentum=0.9, fused=True))
