"""Small models that do not begin with token ids alone: those with an encoder before their blocks, and of images."""

from typing import Any

import torch
import transformers

from tests.integrations.transformers.shrink import VOCABULARY

_SIZES = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 4, "dropout": 0.0, "vocab_size": VOCABULARY}
_HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_FRAMES, _BINS = 20, 8


def _bart() -> Any:
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**_SIZES, **_HEADS, **_TOKENS, max_position_embeddings=32)
    )


def _t5() -> Any:
    """Its blocks pass on the biases of attention that the first one computes."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 4, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, **_TOKENS, vocab_size=VOCABULARY, dropout_rate=0.0)
    )


def _whisper() -> Any:
    lengths = {"max_source_positions": _FRAMES // 2, "max_target_positions": 32, "num_mel_bins": _BINS}
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**_SIZES, **_HEADS, **_TOKENS, **lengths)
    )


def _vit() -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=5)
    )


MODELS = {"BART": _bart, "T5": _t5, "Whisper": _whisper, "ViT": _vit}
BLOCKS: dict[str, dict[str, Any]] = {
    "Whisper": {"dummy_inputs": {"input_features": {"shape": [1, _BINS, _FRAMES]}, "decoder_input_ids": [[1, 1]]}},
    "ViT": {"dummy_inputs": {"pixel_values": {"shape": [1, 3, 8, 8]}}},
}
"""What models need in their block."""


def make(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]()


def inputs_of(name: str, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the micro-batch with the inputs and labels of a model."""
    generator = torch.Generator().manual_seed(int(batch["input_ids"].sum()))
    if name == "Whisper":
        return {"input_features": torch.randn(2, _BINS, _FRAMES, generator=generator), "labels": batch["labels"]}
    if name == "ViT":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator), "labels": batch["labels"][:, 0] % 5}
    return {"input_ids": batch["input_ids"], "labels": batch["labels"].roll(2, 1)}
