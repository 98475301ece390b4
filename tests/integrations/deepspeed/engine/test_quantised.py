"""What travels rounded trains as one process into which the same rounding is put by hand."""

import deepspeed
import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig

from ds_lgamp.cost.units import Travel
from ds_lgamp.integrations.deepspeed.config.check_keys import for_deepspeed
from ds_lgamp.integrations.deepspeed.explain.explain import explain
from ds_lgamp.integrations.deepspeed.explain.text import as_text
from ds_lgamp.integrations.deepspeed.hook.initialize import partition_method_of
from ds_lgamp.runtime.measure import CollectiveCounter
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.frozen_models import Case, engine_of, reference
from tests.integrations.deepspeed.engine.rounded_travel import Seen
from tests.integrations.deepspeed.engine.rounding import train_rounded
from tests.integrations.deepspeed.models import Training, pipeline_module
from tests.integrations.deepspeed.running import Layout, batches, initialize, json_config, train
from tests.runtime.assembly import gathered

TRAINING = Training(blocks=4, momentum=0.9, decay=0.01, clipping=0.5, steps=4)
WEIGHTS, GRADIENTS = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}


def train_cases(cases):
    prepare_rank()
    for layout, weights, gradients in cases:
        train_as_by_hand(layout, weights, gradients)


def train_as_by_hand(layout, weights, gradients):
    run = train(TRAINING, layout)
    losses, norms, parameters = train_rounded(TRAINING, layout.data_ranks, weights, gradients)
    assert run.losses == pytest.approx(losses, rel=1e-6), layout
    assert run.norms == pytest.approx(norms, rel=1e-6), layout
    for name, value in gathered(run.engine.optimizer.partition, lambda unit: unit.storage.shard).items():
        torch.testing.assert_close(value, parameters[name].detach(), rtol=1e-6, atol=1e-6, msg=f"{layout} {name}")


def layouts(ranks):
    for pipeline_ranks in (1, 2):
        data_ranks = ranks // pipeline_ranks
        if data_ranks == 1:
            continue
        for block in ({"chunks_per_rank": 3}, {"chunks_per_rank": 2, "resident_chunks": 1, "micro_batch_group": 4}):
            yield Layout(pipeline_ranks, data_ranks, 3, block, zero=WEIGHTS), 8, None
            for stage in (1, 2, 3):
                for bits in (8, 4):
                    bits_of = {**block, "quantised_gradient_bits": bits}
                    yield Layout(pipeline_ranks, data_ranks, stage, bits_of, zero=GRADIENTS), None, bits
            on_host = {f"offload_{what}": {"device": "cpu"} for what in ("optimizer", "param")}
            yield Layout(pipeline_ranks, data_ranks, 3, block, zero={**WEIGHTS, **GRADIENTS, **on_host}), 8, 8
            overlapped = {**block, "overlap_update": True}
            yield Layout(pipeline_ranks, data_ranks, 3, overlapped, zero=WEIGHTS | GRADIENTS), 8, 8
            both = {**block, "quantised_gradient_bits": 4}
            yield Layout(pipeline_ranks, data_ranks, 3, both, zero=WEIGHTS | GRADIENTS), 8, 4


def test_two_ranks_train_as_one_process_that_rounds_by_hand():
    cases = [
        (Layout(1, 2, 3, {"chunks_per_rank": 3}, zero=WEIGHTS), 8, None),
        (Layout(1, 2, 2, {"chunks_per_rank": 3}, zero=GRADIENTS), None, 8),
        (Layout(1, 2, 3, {"chunks_per_rank": 2, "quantised_gradient_bits": 4}, zero=WEIGHTS | GRADIENTS), 8, 4),
    ]
    run_on_ranks(2, train_cases, cases)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", (2, 4))
def test_every_layout_trains_as_one_process_that_rounds_by_hand(ranks):
    run_on_ranks(ranks, train_cases, list(layouts(ranks)))


def move_as_by_hand(cases):
    prepare_rank()
    for layout, training, config, weights, gradients in cases:
        with pytest.MonkeyPatch.context() as patch:
            engine = initialize(training, layout, **config)
            seen = Seen(engine.optimizer.partition, patch)
            for step in range(2):
                engine.train_batch(batches(step, engine))
                engine.optimizer.partition.catch_up()
                gathers, reduced = seen.check(weights, gradients)
                # Below stage 3, the next step awaits the gathers behind this one.
                assert reduced > 0 and (gathers > 0 or step == 0), (layout, config)


BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}}
LAMB = {"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}}


def moving(ranks):
    clipped, tied = Training(blocks=4, clipping=0.3), Training(blocks=4, tied=True)
    for pipeline_ranks in (1, 2):
        data_ranks = ranks // pipeline_ranks
        if data_ranks > 1:
            for training in (clipped, tied):
                for config in ({}, BF16, MUON, LAMB):
                    optimizer = "json" if "optimizer" in config else "client"
                    layout = Layout(pipeline_ranks, data_ranks, 3, {}, optimizer, WEIGHTS | GRADIENTS)
                    yield layout, training, config, 8, 8
                    at_stage_2 = layout._replace(stage=2, zero=GRADIENTS, block={"quantised_gradient_bits": 4})
                    yield at_stage_2, training, config, None, 4


def test_what_two_ranks_move_is_rounded_as_by_hand():
    run_on_ranks(2, move_as_by_hand, list(moving(2))[:4])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", (2, 4))
def test_what_every_layout_moves_is_rounded_as_by_hand(ranks):
    run_on_ranks(ranks, move_as_by_hand, list(moving(ranks)))


def frozen_weights_train_adapters():
    prepare_rank()
    zero = {"zero_quantized_nontrainable_weights": True}
    case = Case("untied", 1, 3, "client", {}, zero)
    engine = engine_of(case)
    losses = [engine.train_batch(batches(step, engine)).item() for step in range(3)]
    expected, _, _, first = reference(case, rounds_frozen=True)
    assert losses == pytest.approx(expected, rel=1e-6)
    exact, *_ = reference(case)
    assert losses != pytest.approx(exact, rel=1e-6)
    kept = gathered(engine.optimizer.partition, lambda unit: unit.storage.shard)
    assert all(torch.equal(kept[name], first[name]) for name in kept if "adapter" not in name)


def test_frozen_weights_are_rounded_alone_and_stay_exact_in_shards():
    run_on_ranks(2, frozen_weights_train_adapters)


def everything_else_is_exact(folder):
    """What scripts read, change and save is exact, and a checkpoint goes on without rounding."""
    prepare_rank()
    layout = Layout(1, 2, 3, {"chunks_per_rank": 3}, zero=WEIGHTS | GRADIENTS)
    engine = initialize(TRAINING, layout)
    for step in range(2):
        engine.train_batch(batches(step, engine))
    shards = gathered(engine.optimizer.partition, lambda unit: unit.storage.shard)
    parameter = dict(engine.module.named_parameters())[next(iter(dict(engine.module.named_parameters())))]
    with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
        before = parameter.detach().clone()
        if engine.global_rank == 0:
            parameter.data.add_(1e-5)
    assert any(torch.equal(before, value) for value in shards.values())
    with deepspeed.zero.GatheredParameters(parameter):
        assert torch.equal(parameter, before + 1e-5)
    shards = gathered(engine.optimizer.partition, lambda unit: unit.storage.shard)
    state = engine.module.state_dict()
    assert all(any(torch.equal(value, shard) for shard in shards.values()) for value in state.values())
    engine.save_checkpoint(folder, tag="rounded")
    other = initialize(TRAINING, layout._replace(zero={}))
    other.load_checkpoint(folder, tag="rounded")
    loaded = gathered(other.optimizer.partition, lambda unit: unit.storage.shard)
    assert all(torch.equal(loaded[name], value) for name, value in shards.items())


def test_what_is_read_changed_and_saved_is_exact(tmp_path):
    run_on_ranks(2, everything_else_is_exact, str(tmp_path))


SMALL = 48
"""Bytes. Losses, norms and what ranks compare ahead of a batch are at most this large, and every unit is larger."""
TOLD = {
    (3, 8): "weights in 8 bits, 1.0625 bytes per element; gradients in 8 bits, 1.0625 bytes per element",
    (2, 4): "gradients in 4 bits, 0.5625 bytes per element",
}


def bytes_are_told():
    prepare_rank()
    for (stage, bits), words in TOLD.items():
        zero = WEIGHTS | GRADIENTS if stage == 3 else GRADIENTS
        layout = Layout(1, 2, stage, {"chunks_per_rank": 3, "quantised_gradient_bits": bits}, "json", zero)
        config, module = json_config(TRAINING, layout), pipeline_module(TRAINING, 1)
        arguments = {"model": module, "config": config}
        arguments["config_class"] = DeepSpeedConfig(for_deepspeed(config), module.mpu())
        facts = explain(arguments, partition_method_of(module))
        assert f"travel rounded, in blocks of 32: {words}\n" in as_text(facts)
        assert facts.as_data()["travel"] == Travel(*(8 if stage == 3 else None,) * 2, bits)._asdict()
        engine = initialize(TRAINING, layout)
        for step in range(2):
            with CollectiveCounter() as counter:
                engine.train_batch(batches(step, engine))
        assert facts.ranks[0].collective_bytes_sent == sum(sent for _, sent in counter.log if sent > SMALL)
        exact = explain(
            arguments | {"config": json_config(TRAINING, layout._replace(zero={}, block={"chunks_per_rank": 3}))},
            partition_method_of(module),
        )
        part = facts.ranks[0].collective_bytes_sent / exact.ranks[0].collective_bytes_sent
        assert part == pytest.approx(1.0625 / 4 if stage == 3 else (4 + 0.5625) / 8)


def test_the_explanation_tells_the_bytes_of_a_step():
    run_on_ranks(2, bytes_are_told)
