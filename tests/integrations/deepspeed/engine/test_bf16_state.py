"""With DeepSpeed's keys for it, the optimizer updates the bf16 weights themselves and keeps its state in bf16: as one
process with bf16 parameters and torch's optimizer does."""

from itertools import product

import deepspeed
import pytest
import torch
from torch.nn import Parameter

from ds_lgamp.config import ConfigError
from ds_lgamp.cost.state import held_between_steps
from ds_lgamp.integrations.deepspeed.engine.memory import element_bytes, sharding_of, update_of
from ds_lgamp.optimizers.rounding import Noise
from ds_lgamp.partition.agreement import everyone
from ds_lgamp.partition.zero_partition import unit_sizes
from ds_lgamp.runtime.batch import ActionError
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.models import (
    MICRO_BATCHES,
    Training,
    build_layers,
    loss_of,
    pipeline_module,
    scaled_weights,
)
from tests.integrations.deepspeed.running import batches
from tests.runtime.assembly import gathered
from tests.runtime.models import micro_batch
from tests.slow import slow_except

TRAINING = Training(blocks=4, tuples=False, steps=4)
BF16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
KINDS = "Adam", "AdamW"
OPTIONS = {"lr": 0.01, "eps": 0.001, "weight_decay": 0.0}
"""A large epsilon: the direction of an update does not depend on the rounding of a small gradient."""
OFFLOADS = {
    "device": {},
    "host": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


def engine_of(
    name="AdamW",
    pipeline_ranks=1,
    stage=3,
    home="device",
    micro_batches=MICRO_BATCHES,
    bf16=BF16,
    rounds=False,
    training=TRAINING,
    **more,
):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": name, "params": OPTIONS},
        "bf16": bf16,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **OFFLOADS[home]},
        # Four pipeline ranks have no layers for two chunks each.
        "ds_lgamp": {"chunks_per_rank": 1 if pipeline_ranks == 4 else 2, "stochastic_rounding": rounds},
        **more,
    }
    module = pipeline_module(training, pipeline_ranks)
    scaled_weights(module.named_parameters())
    return deepspeed.initialize(model=module, config=config)[0]


class RoundedAdam:
    """Keeps weights and moments in fp32 between rounding all of them by chance."""

    def __init__(self, parameters):
        self.parameters, self.copies = parameters, {key: Parameter(value.float()) for key, value in parameters.items()}
        self.adam, self.steps = torch.optim.AdamW(self.copies.values(), **OPTIONS, fused=True), 0
        self.noise = Noise(1 << 16, torch.device("cpu"))

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for key, parameter in self.parameters.items():
            self.copies[key].grad = parameter.grad.float()
        self.adam.step()
        for key, parameter in self.parameters.items():
            moments = self.adam.state[self.copies[key]]
            for what, values in {"weights": self.copies[key], **moments}.items():
                if what != "step":
                    self.noise.round_(values.view(-1), f"{key}/{what}/{self.steps}", 0)
            parameter.copy_(self.copies[key])

    def zero_grad(self):
        for parameter in self.parameters.values():
            parameter.grad = None


def plain(name, micro_batches, rounds=False):
    """Trains in one process. Returns the losses, and the weights by name."""
    layers, parameters = build_layers(TRAINING)
    for layer in layers:
        if isinstance(layer, torch.nn.Module):
            layer.bfloat16()
    optimizer = RoundedAdam(parameters) if rounds else torch.optim.AdamW(parameters.values(), **OPTIONS, fused=True)
    losses = []
    for step in range(TRAINING.steps):
        sums, loss = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters.values()], 0.0
        for index in range(micro_batches):
            part = loss_of(layers, step, index) / micro_batches
            part.backward()
            loss += part.item()
            for summed, parameter in zip(sums, parameters.values()):
                summed += parameter.grad
            optimizer.zero_grad()
        for summed, parameter in zip(sums, parameters.values()):
            parameter.grad = summed.bfloat16()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses, {key: parameter.detach() for key, parameter in parameters.items()}


def train_as_plain(cases, ranks):
    prepare_rank()
    for name, pipeline_ranks, stage, home, sums in cases:
        engine = engine_of(name, pipeline_ranks, stage, home, data_types={"grad_accum_dtype": sums})
        losses = [engine.train_batch(batches(step, engine)).item() for step in range(TRAINING.steps)]
        expected, weights = plain(name, MICRO_BATCHES * ranks // pipeline_ranks)
        case = name, pipeline_ranks, stage, home, sums
        assert losses == pytest.approx(expected, rel=2e-3), case
        own = gathered(engine.optimizer.partition, lambda unit: unit.storage.shard)
        assert own and all(value.dtype == torch.bfloat16 for value in own.values())
        for key, value in own.items():
            # Sums in bf16 round in another order, so that weights are neighbours of those of one process.
            near = 0.008 if sums == "bf16" else 0.004
            torch.testing.assert_close(value, weights[key], rtol=0.02, atol=near, msg=f"{case} {key}")
        state = engine.optimizer.optimizer.state.values()
        moments = [value for each in state for value in each.values() if torch.is_tensor(value) and value.dim()]
        assert moments and all(moment.dtype == torch.bfloat16 for moment in moments), case
    return len(cases)


def train_to_the_bit():
    prepare_rank()
    for name, stage, home, rounds in product(KINDS, (1, 3), OFFLOADS, (False, True)):
        engine = engine_of(name, 1, stage, home if stage == 3 else "device", micro_batches=1, rounds=rounds)
        losses = [engine.train_batch(batches(step, engine)).item() for step in range(TRAINING.steps)]
        offload = engine.lgamp.program_spec.offload
        assert offload is None or offload.alone, "a single rank stores its gradients at once"
        expected, weights = plain(name, 1, rounds)
        assert losses == expected, (name, stage, home, rounds)
        for key, value in gathered(engine.optimizer.partition, lambda unit: unit.master.values).items():
            assert torch.equal(value, weights[key]), (name, stage, home, rounds, key)


def test_one_rank_equals_a_plain_loop_to_the_bit():
    run_on_ranks(1, train_to_the_bit)


@pytest.mark.parametrize("ranks", slow_except([2], [2, 4]))
def test_every_stage_and_layout_trains_like_one_process(ranks):
    grids = [size for size in (1, 2, 4) if ranks % size == 0]
    cases = [
        (name, pipeline_ranks, stage, home, sums)
        for name, pipeline_ranks, stage, home, sums in product(KINDS, grids, (1, 2, 3), OFFLOADS, ("bf16", "fp32"))
        if (home == "device" or stage == 3) and (name, sums) != ("Adam", "bf16")
    ]
    assert run_on_ranks(ranks, train_as_plain, cases, ranks) == [len(cases)] * ranks


def go_on_from(folder):
    """Saves without copies, and goes on from there at another layout, with copies, and back without."""
    prepare_rank()
    found = {}
    first = engine_of(pipeline_ranks=1, stage=3)
    for step in range(2):
        first.train_batch(batches(step, first))
    first.save_checkpoint(folder, tag="first")
    places = {"another layout": (2, 1, BF16), "with copies": (1, 3, {"enabled": True}), "without": (1, 3, BF16)}
    saved = "first"
    for name, (pipeline_ranks, stage, bf16) in places.items():
        engine = engine_of(pipeline_ranks=pipeline_ranks, stage=stage, bf16=bf16)
        engine.load_checkpoint(folder, tag=saved)
        found[name] = gathered(engine.optimizer.partition, lambda unit: unit.storage.shard)
        state = engine.optimizer.optimizer.state.values()
        types = {value.dtype for each in state for value in each.values() if torch.is_tensor(value) and value.dim()}
        assert types == {torch.float32 if name == "with copies" else torch.bfloat16}, name
        saved = name
        engine.save_checkpoint(folder, tag=saved)
    return gathered(first.optimizer.partition, lambda unit: unit.storage.shard), found


def test_checkpoints_are_read_at_other_layouts_and_with_copies(tmp_path):
    for weights, found in run_on_ranks(2, go_on_from, str(tmp_path)):
        for name, own in found.items():
            assert own and all(torch.equal(value, weights[key]) for key, value in own.items()), name


def rounded_weights(engine, steps):
    for step in steps:
        engine.train_batch(batches(step, engine))
    engine.optimizer.partition.catch_up()
    return gathered(engine.optimizer.partition, lambda unit: unit.storage.shard)


def round_in_every_layout(folder):
    """Trains alike with different shards, homes and numbers of processes, and from a checkpoint of another layout."""
    prepare_rank()
    disk = {"device": "nvme", "nvme_path": folder}
    homes = {**OFFLOADS, "disk": {"offload_optimizer": disk, "offload_param": disk}}
    steps, sums = range(TRAINING.steps), {"grad_accum_dtype": "fp32"}
    expected = rounded_weights(engine_of(stage=1, rounds=True), steps)
    nearest = rounded_weights(engine_of(stage=1), steps)
    assert any(not torch.equal(value, nearest[key]) for key, value in expected.items())
    saved = engine_of(stage=1, rounds=True)
    rounded_weights(saved, steps[:2])
    saved.save_checkpoint(folder, tag="early")
    resumed = engine_of(stage=3, home="host", rounds=True)
    resumed.load_checkpoint(folder, tag="early")
    found = {"from a checkpoint": rounded_weights(resumed, steps[2:])}
    for stage, home in ((2, "device"), (3, "device"), (3, "host"), (3, "disk")):
        with_home = {"zero_optimization": {"stage": stage, **homes[home]}}
        found[stage, home] = rounded_weights(engine_of(stage=stage, rounds=True, **with_home), steps)
    for name, own in found.items():
        assert own and all(torch.equal(value, expected[key]) for key, value in own.items()), name
    pipelined, (_, weights) = (
        engine_of(pipeline_ranks=2, rounds=True, data_types=sums),
        plain("AdamW", MICRO_BATCHES, True),
    )
    own = rounded_weights(pipelined, steps)
    assert own and all(torch.equal(value, weights[key]) for key, value in own.items())
    tied = rounded_weights(engine_of(pipeline_ranks=2, rounds=True, training=TRAINING._replace(tied=True)), steps)
    first, last = everyone(tied["tied_modules.embedding.weight"])
    assert torch.equal(first, last)


def test_weights_are_rounded_alike_in_every_layout(tmp_path):
    run_on_ranks(2, round_in_every_layout, str(tmp_path))


def count_bytes():
    prepare_rank()
    held = {}
    for copies in (False, True):
        engine = engine_of(bf16={"enabled": True} if copies else BF16)
        engine.train_batch(batches(0, engine))
        size = element_bytes(engine._config, update_of(engine.optimizer.optimizer, None), engine.lgamp.travel, False)
        units = unit_sizes(engine.optimizer.partition)
        told = held_between_steps(units, sharding_of(engine.lgamp.program_spec, engine.lgamp.settings, 1), size)
        state = engine.optimizer.optimizer.state.values()
        found = sum(value.nbytes for each in state for value in each.values() if torch.is_tensor(value) and value.dim())
        own = sum(unit.storage.shard.nbytes for unit in engine.optimizer.partition.units)
        masters = [unit.master.values for unit in engine.optimizer.partition.units if unit.master.is_copy]
        assert told == (own, sum(values.nbytes for values in masters), found)
        held[copies] = sum(told) + size.gradients * sum(unit.parameters for unit in units)
    elements = sum(unit.parameters for unit in units)
    return {copies: count / elements for copies, count in held.items()}


def test_a_weight_takes_eight_bytes_with_its_gradient_and_moments():
    """Two for the weight, for the gradient and for each of the moments. With copies in fp32 it takes eight more."""
    assert run_on_ranks(1, count_bytes) == [{False: 8, True: 16}]


def norms_of_groups(groups):
    """Returns the norm of a step of 400 equal micro-batches whose gradients add up group by group."""
    prepare_rank()
    found = []
    for group in groups:
        block = {"micro_batch_group": group, "chunks_per_rank": 2}
        engine = engine_of(micro_batches=400, data_types={"grad_accum_dtype": "fp32"}, ds_lgamp=block)
        engine.train_batch(iter([micro_batch(0, 0)] * 400))
        found.append(float(engine.get_global_grad_norm()))
    return found


def test_gradients_of_groups_and_ranks_add_up_in_the_given_type():
    """In fp32, however many groups there are. In bf16, later ones would round to nothing."""
    for whole, alone in run_on_ranks(2, norms_of_groups, ("all", 1)):
        assert alone == pytest.approx(whole, rel=1e-3)


def skip_steps(folder):
    """Trains with and without a step between whose loss is infinite, in several ways."""
    prepare_rank()
    disk = {"device": "nvme", "nvme_path": folder}
    homes = {**OFFLOADS, "disk": {"offload_optimizer": disk, "offload_param": disk}}
    ways = {"at once": {}, "chunk by chunk": {"overlap_update": True}, "unknown until the step": {"nonfinite": "skip"}}
    for (name, block), home in product(ways.items(), homes):
        if home != "device" and name == "chunk by chunk":
            continue
        found = []
        for factors in ((1, float("inf"), 1, 1), (1, 1, 1)):
            settings = {"chunks_per_rank": 2, "stochastic_rounding": True, **block}
            engine, step = engine_of(ds_lgamp=settings, zero_optimization={"stage": 3, **homes[home]}), 0
            loss_fn = engine.module.loss_fn
            for factor in factors:
                engine.module.loss_fn = lambda *given, loss_fn=loss_fn, factor=factor: loss_fn(*given) * factor
                engine.train_batch(batches(step, engine))
                step += factor == 1
            found.append(rounded_weights(engine, [step]))
            assert engine.skipped_steps == len(factors) - 3, (name, home)
        assert all(bool(torch.isfinite(value).all()) for value in found[0].values()), (name, home)
        assert all(torch.equal(value, found[1][key]) for key, value in found[0].items()), (name, home)


def test_a_step_with_infinite_gradients_changes_nothing_and_later_ones_round_as_without_it(tmp_path):
    run_on_ranks(1, skip_steps, str(tmp_path))


def refuse():
    prepare_rank()
    alone = {
        "bf16_master_weights_and_grads": "bf16.bf16_optimizer_states is False.*set both",
        "bf16_optimizer_states": "requires bf16_master_weights_and_grads",
    }
    for key, said in alone.items():
        with pytest.raises((ConfigError, AssertionError), match=said):
            engine_of(bf16={"enabled": True, key: True})
    with pytest.raises(ConfigError, match="the optimizer is torch.optim.sgd.SGD, which is not known to update"):
        engine_of(optimizer={"type": "SGD", "params": {"lr": 0.01}})
    with pytest.raises(ConfigError, match="stochastic_rounding is true, but the optimizer updates weights in fp32"):
        engine_of(bf16={"enabled": True}, rounds=True)
    engine = engine_of(rounds=True)
    engine.optimizer.optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ActionError, match="stochastic_rounding is true, but a hook on the optimizer"):
        engine.train_batch(batches(0, engine))
    stock = torch.optim.AdamW.step
    torch.optim.AdamW.step = lambda *given: stock(*given)
    try:
        with pytest.raises(ActionError, match="stochastic_rounding is true, but .* a function in place of its step"):
            engine_of(rounds=True).train_batch(batches(0, engine))
    finally:
        torch.optim.AdamW.step = stock


def test_one_of_the_keys_alone_and_what_does_not_round_are_refused():
    run_on_ranks(1, refuse)
