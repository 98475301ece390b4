"""Small models for a training loop of one's own, and micro-batches for them."""

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.nn import functional
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY, MICRO_BATCHES, SAMPLES = 1024, 4, 2
# A dry run is also for a CPU that computes slowly in bf16.
WIDTH, LENGTH = (64, 32) if get_accelerator().device_name() == "cpu" else (256, 128)
INNER, HEADS = 2 * WIDTH, 4
TEXT = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 4}
IMAGE, PATCHES = 3, 16
"""The token that stands for a patch of an image, and patches of an image."""

Arguments = dict[str, torch.Tensor]
"""Arguments of the model. In a batch: [ranks, micro-batches, samples, ...] each."""


def text(ranks: int) -> Arguments:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(IMAGE + 1, VOCABULARY, (ranks, MICRO_BATCHES, SAMPLES, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def without_labels(ranks: int) -> Arguments:
    return {"input_ids": text(ranks)["input_ids"]}


def with_images(ranks: int) -> Arguments:
    """Returns tokens with an image at the beginning of each sample."""
    tokens = text(ranks)["input_ids"]
    tokens[..., :PATCHES] = IMAGE
    images = torch.randn(*tokens.shape[:-1], 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens == IMAGE, -100), "pixel_values": images}


def with_grids(ranks: int) -> Arguments:
    """Returns the same tokens, and patches of their images in rows as Qwen's models take them."""
    batch = with_images(ranks)
    # Each token of an image stands for 2 x 2 patches, of 4 x 4 pixels at two times.
    shape = (ranks, MICRO_BATCHES, SAMPLES * PATCHES * 4, 3 * 2 * 4 * 4)
    patches = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    tokens = batch["input_ids"]
    grid = torch.tensor([1, 8, 8]).expand(*tokens.shape[:-1], 3)
    kinds = (tokens == IMAGE).long()
    return {**batch, "pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": kinds}


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**TEXT, num_attention_heads=HEADS))


def frozen_below() -> nn.Module:
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:2].requires_grad_(False)
    return model


def llava() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    vision = CLIPVisionConfig(**sizes, image_size=32, patch_size=8)
    text = LlamaConfig(**TEXT, num_attention_heads=HEADS)
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE, vision_feature_layer=-1)
    )


def qwen3_vl() -> nn.Module:
    """Features of images are added to hidden states behind a block, too."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_heads": HEADS, "depth": 2, "patch_size": 4}
    vision = {**sizes, "out_hidden_size": WIDTH, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    unit = WIDTH // HEADS // 8
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [unit, unit * 3 // 2, unit * 3 // 2]}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": WIDTH // HEADS}
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config={**TEXT, **heads, "rope_parameters": rotary}, vision_config=vision, image_token_id=IMAGE
        )
    )


def t5() -> nn.Module:
    """What its encoder returns goes to every block of its decoder."""
    sizes = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": INNER, "num_heads": HEADS}
    layers = {"num_layers": 2, "num_decoder_layers": 4}
    return T5ForConditionalGeneration(
        T5Config(**sizes, **layers, vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0)
    )


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        return hidden + self.attention(normed, normed, normed, need_weights=False)[0]


class OwnModel(nn.Module):
    """A model that is none of transformers. It returns its loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(_Residual() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden).float().flatten(0, 1), labels.flatten())
