"""The memory of activations calculated with fake tensors equals that of real ones."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch.utils.data import TensorDataset

from benchmarks.memory import activation_bytes
from benchmarks.model import Block, ModelSize, loss_function, micro_batch
from ds_lgamp.config import LgampConfig
from ds_lgamp.cost.traffic import hop_bytes
from ds_lgamp.integrations.deepspeed.explain.activations import (
    UnknownActivations,
    first_micro_batch,
    measure_activations,
)
from ds_lgamp.partition.shards import ACCUMULATES_IN_OTHER_DTYPES
from ds_lgamp.schedule.spec import ProgramSpec

SIZE = ModelSize(4, 64, 32, 2)
HIDDEN = SIZE.samples * SIZE.sequence * SIZE.width
SPEC = ProgramSpec((0, 1, 0, 1), "layered", 4, 4, zero_stage=1)
"""The last chunk turns at once, as in the benchmark."""
IN_FP32 = SimpleNamespace(
    float16_config=SimpleNamespace(enabled=False, auto_cast=False),
    bfloat16_config=SimpleNamespace(enabled=False),
    buffer_dtype=None,
    grad_accum_dtype=None,
)


def measured(layers, data, loss_fn=loss_function, settings=None, config=IN_FP32, spec=SPEC):
    module = SimpleNamespace(_layer_specs=layers, loss_fn=loss_fn)
    bounds = list(range(len(layers) + 1))
    settings = settings or LgampConfig()
    spec = replace(spec, recomputes=settings.recompute == "full")
    return measure_activations(module, layers, bounds, data, spec, settings, config)


@pytest.mark.parametrize("recompute", ["full", "none"])
def test_fake_tensors_tell_what_the_benchmark_measures_with_real_ones(recompute):
    """With this measurement, the formula equals the memory of training steps on real ranks."""
    blocks = [Block(index, SIZE) for index in range(SIZE.blocks)]
    weights = [parameter for block in blocks for parameter in block.parameters()]
    found = measured(blocks, micro_batch(SIZE, 0, 0), settings=LgampConfig(recompute=recompute))
    assert replace(found, flops=(), all_to_all=()) == activation_bytes(SIZE, recompute == "full")
    assert [parameter for block in blocks for parameter in block.parameters()] == weights, (
        "the layers have other parameters"
    )
    assert not any(isinstance(weight, torch._subclasses.FakeTensor) for weight in weights)


@pytest.mark.parametrize(("narrow", "sent"), [("bf16", 2 * HIDDEN), ("fp8", HIDDEN + 4 * HIDDEN // 128)])
def test_hidden_states_that_travel_rounded_are_messages_of_fewer_bytes(narrow, sent):
    blocks = [Block(index, SIZE) for index in range(SIZE.blocks)]
    plain, rounded = (
        measured(blocks, micro_batch(SIZE, 0, 0), settings=settings)
        for settings in (LgampConfig(), LgampConfig(activation_dtype=narrow))
    )
    assert [chunk.sent for chunk in rounded.chunks] == [sent, sent, sent, None]
    assert [replace(chunk, sent=None) for chunk in rounded.chunks] == plain.chunks
    assert [hop_bytes(rank, SPEC.placement, 4, plain) for rank in (0, 1)] == [2 * 4 * 4 * HIDDEN, 4 * 4 * HIDDEN]
    assert [hop_bytes(rank, SPEC.placement, 4, rounded) for rank in (0, 1)] == [2 * 4 * sent, 4 * sent]
    frozen = measured(
        blocks,
        micro_batch(SIZE, 0, 0),
        settings=LgampConfig(activation_dtype=narrow),
        spec=replace(SPEC, first_trained=2),
    )
    assert [chunk.sent for chunk in frozen.chunks] == [None, None, sent, None]


def test_layers_that_draw_are_noticed_and_draw_nothing():
    layers = [torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    data = torch.zeros(2, 4), torch.zeros(2, 4)
    before = torch.get_rng_state()
    assert measured(layers, data, torch.nn.functional.mse_loss).draws
    layers[1] = torch.nn.Identity()
    assert not measured(layers, data, torch.nn.functional.mse_loss).draws
    assert torch.equal(torch.get_rng_state(), before)


def test_a_layer_that_reads_values_is_named():
    layers = [torch.nn.Linear(4, 4), lambda hidden: hidden * hidden.sum().item(), torch.tanh, torch.tanh]
    with pytest.raises(UnknownActivations, match="a layer does not work on tensors without values"):
        measured(layers, (torch.zeros(2, 4), torch.zeros(2, 4)), torch.nn.functional.mse_loss)


def test_a_micro_batch_is_that_of_deepspeeds_loader():
    data = TensorDataset(torch.zeros(3, 4), torch.zeros(3))
    inputs, labels = first_micro_batch(data, None, 5)
    assert inputs.shape == (5, 4) and labels.shape == (5,)
    assert first_micro_batch(data, lambda samples: (len(samples), "labels", "more"), 2) == (2, "labels")
    with pytest.raises(UnknownActivations, match="got no training_data"):
        first_micro_batch(None, None, 2)
    with pytest.raises(UnknownActivations, match="the first samples of training_data failed"):
        first_micro_batch(iter([1]), None, 2)


def test_the_block_of_a_specification_is_measured_without_memory():
    with torch.device("meta"):
        layers = [LayerSpec(torch.nn.Linear, 4, 4).build() for _ in range(4)]
    found = measured(layers, (torch.zeros(2, 4), torch.zeros(2, 4)), torch.nn.functional.mse_loss)
    assert [chunk.result for chunk in found.chunks] == [32, 32, 32, 0] and found.inputs == found.labels == 32


def test_gradients_accumulate_where_they_are():
    """The gradients of weights are larger than everything else here, and exist one after another."""
    linear = [torch.nn.Linear(64, 64) for _ in range(6)]
    layers = [linear[0], torch.nn.Sequential(*linear[1:4]), *linear[4:]]
    found = measured(layers, (torch.zeros(1, 64), torch.zeros(1, 64)), torch.nn.functional.mse_loss)
    weight = 4 * 64 * 64
    assert weight < found.chunks[1].backward < 2 * weight


@pytest.mark.skipif(not ACCUMULATES_IN_OTHER_DTYPES, reason="this torch accumulates in another type through a hook")
def test_gradients_that_accumulate_in_another_type_take_no_temporary_of_that_type():
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(4)]
    data = torch.zeros(1, 64), torch.zeros(1, 64)
    bf16 = {**vars(IN_FP32), "bfloat16_config": SimpleNamespace(enabled=True)}
    data = tuple(member.bfloat16() for member in data)
    plain, wide = (
        measured(
            layers, data, torch.nn.functional.mse_loss, config=SimpleNamespace(**{**bf16, "grad_accum_dtype": kind})
        )
        for kind in (None, "fp32")
    )
    assert wide.chunks[1].backward == plain.chunks[1].backward


def test_chunks_that_no_gradient_reaches_keep_nothing():
    blocks = [Block(index, SIZE) for index in range(SIZE.blocks)]
    data, settings = micro_batch(SIZE, 0, 0), LgampConfig(recompute="none")
    whole, upper = (
        measured(blocks, data, settings=settings, spec=replace(SPEC, first_trained=first)).chunks for first in (0, 2)
    )
    for chunk in (0, 1):
        assert (upper[chunk].backward, upper[chunk].saved) == (0, 0)
        assert upper[chunk].result < upper[chunk].forward < whole[chunk].forward
    assert upper[2:] == whole[2:]
