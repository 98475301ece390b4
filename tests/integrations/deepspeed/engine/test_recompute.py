"""Partial recomputation is exact and keeps no more than it needs."""

import gc
from types import SimpleNamespace

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_lgamp.config import ConfigError
from ds_lgamp.runtime.measure import PeakMemory, live_tensors
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.linear import engine_of, mean_square
from tests.integrations.deepspeed.models import seed
from tests.runtime.assembly import gathered

WIDTH, TOKENS, MICRO_BATCHES = 6, 160, 3
TOLERANCE = 2e-6
"""Relative to a gradient's norm. In fp32, orders of summation differ by less."""
MEGATRON_LAYERS, HIDDEN = 4, 32


class SavedView(torch.autograd.Function):
    """A product that saves its factors as it gets them."""

    @staticmethod
    def forward(context, inputs, view):
        context.save_for_backward(inputs, view)
        return inputs @ view

    @staticmethod
    def backward(context, gradient):
        inputs, view = context.saved_tensors
        return gradient @ view.T, (inputs.transpose(-1, -2) @ gradient).sum(0)


class Viewing(nn.Linear):
    """A linear layer whose graph holds a view of its weight."""

    def forward(self, inputs):
        return SavedView.apply(inputs, self.weight.view(-1).view(WIDTH, WIDTH).T) + self.bias


class InPlace(nn.Linear):
    """Changes its input in place, if allowed."""

    allowed = True

    def forward(self, inputs):
        return super().forward(inputs.mul_(2.0) if self.allowed else inputs * 2.0)


class Attention(nn.Module):
    """Keeps its scores [samples, tokens, tokens]."""

    def __init__(self):
        super().__init__()
        self.mix, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def attend(self, hidden):
        return self.dropout(torch.softmax(hidden @ hidden.transpose(1, 2), dim=-1)) @ hidden

    def forward(self, inputs):
        return inputs + self.attend(self.mix(inputs))


class Attending(Attention):
    """Attention that can recompute its scores."""

    recompute_selectively = False

    def forward(self, inputs):
        if self.recompute_selectively and torch.is_grad_enabled():
            return inputs + checkpoint(self.attend, self.mix(inputs), use_reentrant=False)
        return super().forward(inputs)


KEEPING = [Viewing, nn.Tanh, InPlace, nn.Linear, nn.Tanh, InPlace, Viewing, nn.Linear]
"""A layer changes the saved result of a tanh: on the same rank (1) and on another one (4)."""
ATTENTION, ATTENDING = [Attention] * 6, [Attending] * 6


def specs(kinds):
    return [LayerSpec(kind, WIDTH, WIDTH) if issubclass(kind, nn.Linear) else LayerSpec(kind) for kind in kinds]


def micro_batch(index, width=WIDTH):
    """Returns inputs and labels, [samples, tokens, width]."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(2, TOKENS, width, generator=generator), torch.randn(2, TOKENS, width, generator=generator)


def engine(kinds, pipeline_ranks, **block):
    with quiet():
        module = PipelineModule(
            specs(kinds), num_stages=pipeline_ranks, loss_fn=mean_square, seed_layers=True, seed_fn=seed
        )
    block = {"layers_per_chunk": 1, "placement": "contiguous", **block}
    return engine_of(module, block, micro_batches=MICRO_BATCHES, train_micro_batch_size_per_gpu=2)


def gradients_of(engine, width=WIDTH):
    """Runs a step. Returns its gradients by global name."""
    found, step = {}, engine.optimizer.step

    def recording_step():
        found.update(gathered(engine.optimizer.partition, lambda unit: unit.reduction.shard_gradient))
        step()

    engine.optimizer.step = recording_step
    first = MICRO_BATCHES * engine.grid.data_parallel_id
    engine.train_batch(iter([micro_batch(first + index, width) for index in range(MICRO_BATCHES)]))
    return found


def gradients_and_peak_of(engine):
    """Also returns the most bytes that the step needed in addition to the existing ones."""
    # Deletes engines of earlier cases, because their memory would count as freed by this step.
    gc.collect()
    with PeakMemory(live_tensors()) as memory:
        before = memory.live()
        gradients = gradients_of(engine)
    return gradients, memory.peak - before


def reference_gradients(kinds, data_ranks):
    """Returns the gradients of one process. The layers draw the same numbers as those of ``engine``."""
    layers = []
    for index, spec in enumerate(specs(kinds)):
        seed(1234 + index)
        layers.append(spec.build())
        layers[-1].allowed = False
    count = MICRO_BATCHES * data_ranks
    for index in range(count):
        hidden, labels = micro_batch(index)
        for number, layer in enumerate(layers):
            # PipelineModule seeds a layer for a micro-batch of its data-parallel rank in this way.
            seed(1234 * (index % MICRO_BATCHES + 2) + number)
            hidden = layer(hidden)
        (mean_square(hidden, labels) / count).backward()
    return {
        f"{index}.{name}": parameter.grad
        for index, layer in enumerate(layers)
        for name, parameter in layer.named_parameters()
    }


def check(gradients, kinds, label):
    expected = reference_gradients(kinds, 2)
    for name, gradient in gradients.items():
        difference = (gradient - expected[name]).norm() / expected[name].norm()
        assert difference < TOLERANCE, (label, name, difference)


def keep_views_and_changed_tensors():
    prepare_rank()
    for stage, resident in ((3, 1), (3, 2), (3, 4), (1, 2)):
        for recompute in ("none", "full"):
            made = engine(KEEPING, 2, resident_chunks=resident, recompute=recompute)
            check(gradients_of(made), KEEPING, (stage, resident, recompute))
    return True


def test_views_of_weights_and_changed_inputs_are_exact():
    """At stage 3 weights are freed and gathered again between forward and backward. Runs chunks on one rank and on
    two."""
    assert all(run_on_ranks(4, keep_views_and_changed_tensors))


def recompute_in_three_ways():
    prepare_rank()
    peaks = {}
    for recompute in ("full", "selective", "none"):
        made = engine(ATTENDING, 1, recompute=recompute)
        layers = [layer for layer in made.module.modules() if isinstance(layer, Attending)]
        assert all(layer.recompute_selectively == (recompute == "selective") for layer in layers)
        gradients, peaks[recompute] = gradients_and_peak_of(made)
        check(gradients, ATTENDING, recompute)
    return peaks


def test_selective_recomputation_is_between_full_and_none():
    for peaks in run_on_ranks(2, recompute_in_three_ways):
        assert peaks["full"] < peaks["selective"] < peaks["none"]


def megatron_engine(recompute, **named):
    from megatron.core.transformer import TransformerConfig

    from ds_lgamp.integrations.megatron.layers.transformer_block import TransformerBlock

    config = TransformerConfig(
        num_layers=MEGATRON_LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        **named,
    )
    blocks = [LayerSpec(TransformerBlock, config, number + 1, rotary=None) for number in range(MEGATRON_LAYERS)]
    with quiet():
        module = PipelineModule(blocks, num_stages=1, loss_fn=mean_square, seed_layers=True, seed_fn=seed)
    return engine_of(module, {"recompute": recompute}, micro_batches=MICRO_BATCHES, train_micro_batch_size_per_gpu=2)


def recompute_attention_of_megatron():
    """Imitates a GPU, because Megatron-core reads its random states only there."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    from ds_lgamp.integrations.deepspeed.model import recomputation

    prepare_rank()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    random._get_cuda_rng_state = lambda **_: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, **_: torch.set_rng_state(state)
    recomputed, checkpointed = [], random.CheckpointFunction.backward
    random.CheckpointFunction.backward = lambda *given: recomputed.append(1) or checkpointed(*given)
    outcomes = {}
    for recompute in ("none", "selective on a CPU", "selective"):
        if recompute == "selective on a CPU":
            with pytest.raises(ConfigError, match="no layer of the model offers it"):
                megatron_engine("selective")
            recomputation.get_accelerator = lambda: SimpleNamespace(device_name=lambda: "cuda")
            continue
        del recomputed[:]
        outcomes[recompute] = gradients_of(megatron_engine(recompute), HIDDEN), len(recomputed)
    layers = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    as_configured = megatron_engine("selective", **layers).module
    assert not any(getattr(module, recomputation.MEGATRON_SWITCH, False) for module in as_configured.modules())
    return outcomes


def test_megatrons_layers_recompute_their_attention():
    pytest.importorskip("megatron.core")
    for outcomes in run_on_ranks(2, recompute_attention_of_megatron):
        (expected, never), (gradients, number) = outcomes["none"], outcomes["selective"]
        assert (never, number) == (0, MEGATRON_LAYERS * MICRO_BATCHES)
        for name, gradient in gradients.items():
            assert torch.equal(gradient, expected[name]), name
