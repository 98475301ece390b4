"""Backwards in two parts change no bit of a training, no count of collectives, and memory as the formula says."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ds_lgamp.config import ConfigError, read_block
from ds_lgamp.cost.memory import rank_memory
from ds_lgamp.integrations.deepspeed.engine.memory import element_bytes, update_of
from ds_lgamp.integrations.deepspeed.explain.activations import measure_activations
from ds_lgamp.partition.zero_partition import unit_sizes
from ds_lgamp.runtime.measure import CollectiveCounter
from ds_lgamp.schedule.actions import Kind
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.test_recompute import (
    ATTENDING,
    MICRO_BATCHES,
    Attending,
    engine,
    gradients_and_peak_of,
    gradients_of,
    mean_square,
    micro_batch,
)
from tests.integrations.deepspeed.plain.training import train_all_on_rank
from tests.slow import slow_except

SOME = ["Mixtral", "a tied GPT", "a GPT that mixes"]
MODELS = [*SOME, "GPT-2", "Llama", "BERT"]
LINEAR = [nn.Linear, nn.Tanh] * 4
BLOCKS = [
    {},
    {"recompute": "none"},
    {"recompute": "none", "schedule": "1f1b", "layers_per_chunk": None},
    {"micro_batch_group": 2, "resident_chunks": 1, "placement": "modular"},
    {"offload_activations": "cpu", "placement": "modular"},
    {"overlap_update": True, "defer_gathers": True},
]


def second_parts(trained):
    program = trained.lgamp.program(trained.lgamp.own_spec)
    return sum(action.kind is Kind.WEIGHTS_BACKWARD for action in program)


def counted_step(kinds, split, block):
    trained = engine(kinds, 2, split_backward=split, **block)
    with CollectiveCounter() as counter:
        gradients = gradients_of(trained)
    return gradients, sorted(counter.log), second_parts(trained)


def both_ways():
    """Returns the blocks for which a step with parts differs on this rank, and the number of second parts."""
    prepare_rank()
    different, parts = [], 0
    for (number, block), kinds in product(enumerate(BLOCKS), (ATTENDING, LINEAR)):
        whole, calls, _ = counted_step(kinds, False, block)
        split, same_calls, found = counted_step(kinds, (True, 1)[number % 2], block)
        parts += found
        if calls != same_calls or not all(torch.equal(split[name], whole[name]) for name in whole):
            different.append((number, kinds[0].__name__))
    return different, parts


@pytest.mark.parametrize("ranks", slow_except([4], [2, 4]))
def test_gradients_and_collectives_of_a_step_stay_the_same(ranks):
    for different, parts in run_on_ranks(ranks, both_ways):
        assert not different
        assert parts > 0


def memory_of_steps():
    """Returns the peak of a step beyond what lies between steps, measured and by the formula, for several limits."""
    prepare_rank()
    found = {}
    for recompute, split in product(("full", "none"), (False, 1, 2, 3)):
        trained = engine(ATTENDING, 2, split_backward=split, recompute=recompute, placement="modular")
        core, layers = trained.lgamp, [Attending() for _ in ATTENDING]
        gradients_of(trained)
        _, peak = gradients_and_peak_of(trained)
        module = SimpleNamespace(_layer_specs=layers, loss_fn=mean_square)
        arguments = layers, range(len(layers) + 1), micro_batch(0), core.own_spec, core.settings, core.config
        sizes, program = measure_activations(module, *arguments), core.program(core.own_spec)
        element = element_bytes(core.config, update_of(core.door.optimizer.optimizer, None), core.travel, False)
        told = rank_memory(program, unit_sizes(core.partition), core.sharding, element, sizes)
        found[recompute, split] = peak, told.peak - told.weights, sizes.random_states * len(layers) * MICRO_BATCHES
    return found


def test_memory_is_as_the_formula_says():
    for rank, found in enumerate(run_on_ranks(2, memory_of_steps)):
        for case, (peak, told, states) in found.items():
            assert abs(peak - told) <= 0.01 * told + states, (rank, case, peak, told)
        assert found["full", 3][0] > 1.02 * found["full", False][0]


@pytest.mark.parametrize(
    ("stage", "models"),
    slow_except([(3, SOME)], [(3, SOME), *((stage, MODELS) for stage in range(4))], several=True),
    ids=lambda value: f"{len(value)} models" if isinstance(value, list) else f"stage {value}",
)
def test_scripts_train_models_to_the_same_bits(stage, models):
    """With tied weights, experts, and layers that mix."""
    blocks = [{"pipeline_ranks": 2, "split_backward": split} for split in (False, True)]
    cases = [(name, stage, block) for name in models for block in blocks]
    for courses in run_on_ranks(2, train_all_on_rank, cases):
        for whole, split in zip(courses[::2], courses[1::2]):
            assert whole.losses == split.losses
            for right, gradients in zip(whole.gradients, split.gradients, strict=True):
                assert all(torch.equal(gradients[name], gradient) for name, gradient in right.items())


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"split_backward": True, "compile": True}, "split_backward is True, but compile is True"),
        (
            {"split_backward": 2, "recompute": "auto"},
            "split_backward is 2, but recompute is 'auto', which measures whole",
        ),
        ({"split_backward": True, "compile": {}}, "split_backward is True, but compile is {}"),
        ({"split_backward": True, "reproducible": True}, "but reproducible is True, which promises the same bits"),
        ({"split_backward": 0}, "split_backward is 0"),
        ({"split_backward": "yes"}, "split_backward is 'yes'"),
    ],
)
def test_what_has_one_part_only_is_refused(block, message):
    with pytest.raises(ConfigError, match=message):
        read_block({"ds_lgamp": block})
