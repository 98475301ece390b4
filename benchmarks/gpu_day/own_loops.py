"""Models in a training loop of one's own: trained by plain torch in one process, and under DeepSpeed on all ranks."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from transformers import CLIPVisionConfig, LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration

from benchmarks.gpt.contenders import MasterWeights
from benchmarks.gpu_day.equality import PRECISIONS, STEPS, compared, device

VOCABULARY, MICRO_BATCHES, SAMPLES, LENGTH = 1024, 4, 2, 128
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
IMAGE, PATCHES = 3, 16
"""The token that stands for a patch of an image, and patches of an image."""

Arguments = dict[str, torch.Tensor]
"""Arguments of the model. In a batch: [ranks, micro-batches, samples, ...] each."""


class OwnLoop(NamedTuple):
    """What the script of a user has."""

    model: Callable[[], nn.Module]
    """Makes the model in fp32."""
    batch: Callable[[int], Arguments]
    """Makes the batch of every step for a number of ranks."""
    loss: Callable[[Any, Arguments], torch.Tensor]
    """Takes the loss from what the model returns for a micro-batch."""
    block: Mapping[str, Any] = {}
    precision: str = "fp32"

    def compared(self, pipeline_ranks: int) -> dict[str, Any]:
        """Trains on all ranks. Returns the losses beside those of plain torch in this process."""
        batch = {key: tensor.to(device()) for key, tensor in self.batch(dist.get_world_size()).items()}
        losses = self._losses_of_engine(batch, pipeline_ranks)
        return compared(losses, self._losses_of_plain_torch(batch), self.precision)

    def _made(self) -> nn.Module:
        torch.manual_seed(0)
        return self.model().to(PRECISIONS[self.precision][0])

    def _losses_of_plain_torch(self, batch: Arguments) -> list[float]:
        """Trains the whole batch in this process."""
        model = self._made().to(device())
        masters = MasterWeights((weight for weight in model.parameters() if weight.requires_grad), build_optimizer)
        ranks = range(dist.get_world_size())
        micro_batches = [_at(batch, rank, number) for rank in ranks for number in range(MICRO_BATCHES)]
        found = []
        for _ in range(STEPS):
            total = torch.zeros((), device=device())
            for each in micro_batches:
                loss = self.loss(model(**each), each) / len(micro_batches)
                loss.backward()
                total += loss.detach()
            masters.step()
            found.append(total.item())
        return found

    def _losses_of_engine(self, batch: Arguments, pipeline_ranks: int) -> list[float]:
        """Trains this rank's part of the batch. Returns the mean losses of all ranks."""
        model = self._made()
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=build_optimizer(weight for weight in model.parameters() if weight.requires_grad),
            config={
                "train_micro_batch_size_per_gpu": SAMPLES,
                "gradient_accumulation_steps": MICRO_BATCHES,
                "gradient_clipping": 0.0,
                "bf16": {"enabled": self.precision == "bf16"},
                "data_types": {"grad_accum_dtype": "fp32"},
                "zero_optimization": {"stage": 3},
                "ds_lgamp": {"pipeline_ranks": pipeline_ranks, **self.block},
            },
        )
        engine.train()
        found = []
        for _ in range(STEPS):
            total = torch.zeros((), device=device())
            for number in range(MICRO_BATCHES):
                each = _at(batch, dist.get_rank(), number)
                loss = self.loss(engine(**each), each)
                engine.backward(loss)
                engine.step()
                total += loss.detach() / MICRO_BATCHES
            dist.all_reduce(total)
            found.append(total.item() / dist.get_world_size())
        return found


def _at(batch: Arguments, rank: int, number: int) -> Arguments:
    return {key: tensor[rank, number] for key, tensor in batch.items()}


def build_optimizer(weights: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=1e-3, eps=1e-3)


def _tokens(ranks: int) -> Arguments:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(IMAGE + 1, VOCABULARY, (ranks, MICRO_BATCHES, SAMPLES, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def _without_labels(ranks: int) -> Arguments:
    return {"input_ids": _tokens(ranks)["input_ids"]}


def _with_images(ranks: int) -> Arguments:
    """Returns tokens with an image at the beginning of each sample."""
    tokens = _tokens(ranks)["input_ids"]
    tokens[..., :PATCHES] = IMAGE
    images = torch.randn(*tokens.shape[:-1], 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens == IMAGE, -100), "pixel_values": images}


def _own_loss(outputs: Any, arguments: Arguments) -> torch.Tensor:
    return outputs.loss


def _smoothed(outputs: Any, arguments: Arguments) -> torch.Tensor:
    """Returns a loss that the model does not have."""
    logits = outputs.logits[:, :-1].float().transpose(1, 2)
    return functional.cross_entropy(logits, arguments["input_ids"][:, 1:], label_smoothing=0.1)


def _llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**TEXT, num_attention_heads=4))


def _frozen_below() -> nn.Module:
    model = _llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:2].requires_grad_(False)
    return model


def _llava() -> nn.Module:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = CLIPVisionConfig(**sizes, image_size=32, patch_size=8)
    text = LlamaConfig(**TEXT, num_attention_heads=4)
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE, vision_feature_layer=-1)
    )


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(256), nn.MultiheadAttention(256, 4, batch_first=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        return hidden + self.attention(normed, normed, normed, need_weights=False)[0]


class _OwnModel(nn.Module):
    """A model that is none of transformers. It returns its loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 256)
        self.blocks = nn.ModuleList(_Residual() for _ in range(4))
        self.head = nn.Linear(256, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden).float().flatten(0, 1), labels.flatten())


LOOPS = {
    "transformers": OwnLoop(_llama, _tokens, _own_loss),
    "transformers, bf16": OwnLoop(_llama, _tokens, _own_loss, precision="bf16"),
    "transformers, frozen below": OwnLoop(_frozen_below, _tokens, _own_loss),
    "transformers, outputs all": OwnLoop(_llama, _without_labels, _smoothed, {"outputs": "all"}),
    "transformers, images": OwnLoop(_llava, _with_images, _own_loss, precision="bf16"),
    "a model of one's own": OwnLoop(_OwnModel, _tokens, lambda loss, arguments: loss),
}
"""By name. In bf16, attention is flash attention on a GPU."""
