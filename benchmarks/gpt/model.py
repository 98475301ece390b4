"""The GPT that all contenders train, with the same layers, weights, tokens and optimizer."""

from collections.abc import Iterable

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec
from megatron.core.transformer import TransformerConfig
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from benchmarks.gpt.sizes import GptSize
from benchmarks.selective import keeping_products
from ds_lgamp.integrations.megatron.layers.gpt_layers import gpt_layer_specs, language_model_loss
from ds_lgamp.schedule.placement import split_automatic

LEARNING_RATE = ADAM_EPSILON = 1e-2
"""Large enough for gradients to matter. With a much smaller epsilon, gradients that are wrong by a factor would train
the same."""
SEED = 1234

Batch = list[tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]]
"""By micro-batch: tokens [b, s] and labels. Labels are target tokens [b, s] and loss mask [b, s]."""


class SeededSpec(LayerSpec):
    """A layer whose weights depend only on its index in the model, so that every pipeline rank builds the same."""

    def __init__(self, index: int, spec: LayerSpec) -> None:
        super().__init__(spec.typename, *spec.module_args, **spec.module_kwargs)
        self.index = index

    def build(self, log: bool = False) -> nn.Module:
        wanted = torch.get_default_device()
        if wanted.type == "meta":
            return super().build(log)
        # Wherever the layer is to live, its numbers are those that the accelerator draws: a CPU draws others.
        torch.manual_seed(SEED + self.index)
        with torch.device(get_accelerator().current_device_name()):
            layer = super().build(log)
        return layer.to(wanted)


def layer_specs(size: GptSize) -> list[LayerSpec]:
    """Specifications of embedding, positions, transformer layers, norm and head."""
    config = TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.width,
        num_attention_heads=size.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,  # initialises on torch's default device with torch's generator
    )
    specs = gpt_layer_specs(config, size.vocabulary, size.sequence, "learned_absolute", tie_embeddings=False)
    return [SeededSpec(index, spec) for index, spec in enumerate(specs)]


def batch_of(size: GptSize, device: torch.device | str) -> Batch:
    """Makes the batch that every step uses. The loss falls on random tokens, because they repeat."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (size.micro_batches, size.samples, size.sequence + 1)
    tokens = torch.randint(size.vocabulary, shape, generator=generator).to(device)
    mask = torch.ones(size.samples, size.sequence, device=device)
    return [(sample[:, :-1].contiguous(), (sample[:, 1:].contiguous(), mask)) for sample in tokens]


def build_optimizer(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=ADAM_EPSILON, fused=True)


class Gpt(nn.Module):
    """The layers as one module. It maps tokens and labels of a micro-batch to its loss.

    Args:
        size: size of the model.
        recompute: ``full`` recomputes chunk by chunk, as ds_lgamp does, but for the last chunk, which has head and loss
            and whose backward follows its forward. ``layers`` does not recompute the embedding either, and ``half``
            only every second transformer layer. ``operators`` recomputes transformer layers but for their products.
            ``none`` recomputes nothing.
        dtype: data type of the weights.
    """

    def __init__(self, size: GptSize, recompute: str, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        specs = layer_specs(size)
        # Casts each layer when it is built, so that at most one is in fp32.
        self.layers = nn.Sequential(*(spec.build().to(dtype) for spec in specs))
        self.segments = segments([spec.typename.__name__ for spec in specs], recompute)
        self.contexts = keeping_products if recompute == "operators" else noop_context_fn

    def forward(self, tokens: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        value = tokens
        for members, recomputed in self.segments:
            if recomputed:
                options = {"use_reentrant": False, "context_fn": self.contexts}
                value = checkpoint(self._through, members, value, labels, **options)
            else:
                value = self._through(members, value, labels)
        return value

    def _through(self, members: range, value: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        for index in members:
            value = self.layers[index](value)
        return value if members.stop < len(self.layers) else language_model_loss(value, labels)


def segments(types: list[str], recompute: str) -> list[tuple[range, bool]]:
    """Returns runs of consecutive layers, given all layers' types, each with whether it is recomputed."""
    if recompute == "none":
        return [(range(len(types)), False)]
    chunks = split_automatic(types)
    last_chunk = chunks[-2]
    bounds = chunks if recompute == "full" else range(len(types) + 1)
    chosen = range(0, last_chunk, 2 if recompute == "half" else 1)
    return [
        (range(first, end), first in chosen and (recompute == "full" or types[first] == "TransformerBlock"))
        for first, end in zip(bounds, bounds[1:])
    ]
