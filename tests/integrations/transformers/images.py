"""Small models of images and text, and micro-batches for them."""

from typing import Any

import torch
import transformers

from tests.integrations.transformers.shrink import small

IMAGE, START, END = 3, 1, 2
"""The token of which an image has several, and those around an image."""
_PATCHES = 4
_VISION = {"image_size": 8, "patch_size": 4, "num_hidden_layers": 1, "num_attention_heads": 4}
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_QWEN = {"num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}


def _gemma() -> Any:
    text, vision = small(transformers.Gemma3TextConfig), small(transformers.SiglipVisionConfig, **_VISION)
    tokens = {"image_token_id": IMAGE, "boi_token_id": START, "eoi_token_id": END}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=_PATCHES, **tokens)
    return transformers.Gemma3ForConditionalGeneration(config)


def _llava() -> Any:
    text, vision = small(transformers.LlamaConfig), small(transformers.CLIPVisionConfig, **_VISION)
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=IMAGE, vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration(config)


def _paligemma() -> Any:
    text, vision = small(transformers.GemmaConfig), small(transformers.SiglipVisionConfig, **_VISION)
    sizes = {"projection_dim": 32, "hidden_size": 32}
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE, **sizes)
    return transformers.PaliGemmaForConditionalGeneration(config)


def _smolvlm() -> Any:
    text, vision = (
        small(transformers.LlamaConfig),
        small(transformers.SmolVLMVisionConfig, **{**_VISION, "patch_size": 2}),
    )
    config = transformers.SmolVLMConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, scale_factor=2)
    return transformers.SmolVLMForConditionalGeneration(config)


def _internvl() -> Any:
    sizes = {"image_size": [8, 8], "patch_size": [2, 2], "hidden_size": 32, "intermediate_size": 48}
    vision = transformers.InternVLVisionConfig(**{**_VISION, **sizes})
    config = transformers.InternVLConfig(
        text_config=small(transformers.Qwen2Config), vision_config=vision, image_token_id=IMAGE, image_seq_length=4
    )
    return transformers.InternVLForConditionalGeneration(config)


def _qwen(kind: str, **vision: Any) -> Any:
    """Images of any size: how many patches they have depends on values in the batch."""
    text = small(getattr(transformers, f"{kind}TextConfig"), rope_parameters=_ROTARY)
    tokens = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config={**_QWEN, **vision}, **tokens)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


MODELS = {
    "Gemma 3 with images": _gemma,
    "LLaVA": _llava,
    "PaliGemma": _paligemma,
    "SmolVLM": _smolvlm,
    "InternVL": _internvl,
    "Qwen2-VL": lambda: _qwen("Qwen2VL", depth=1, embed_dim=32, hidden_size=32, mlp_ratio=2),
    "Qwen2.5-VL": lambda: _qwen(
        "Qwen2_5_VL",
        depth=2,
        hidden_size=32,
        intermediate_size=48,
        out_hidden_size=32,
        window_size=16,
        fullatt_block_indexes=[1],
    ),
    # It adds features of images to the hidden states after several blocks.
    "Qwen3-VL": lambda: _qwen(
        "Qwen3VL",
        depth=2,
        hidden_size=32,
        intermediate_size=48,
        out_hidden_size=32,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    ),
}


def make(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]()


def text(name: str, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the micro-batch as the model takes it without images."""
    return {**batch, "token_type_ids": torch.zeros_like(batch["input_ids"])} if "Gemma" in name else batch


def with_images(name: str, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the micro-batch with an image at the beginning of each of its two sequences."""
    generator = torch.Generator().manual_seed(int(batch["input_ids"].sum()))
    tokens, lengths = batch["input_ids"].clone(), (_PATCHES, _PATCHES)
    images = {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    if "Qwen" in name:
        # One of 4 x 4 patches, and one of 2 x 4; four make a token.
        lengths, grids = (4, 2), torch.tensor([[1, 4, 4], [1, 2, 4]])
        images = {"pixel_values": torch.randn(24, 96, generator=generator), "image_grid_thw": grids}
    for row, length in zip(tokens, lengths):
        row[0], row[1 : 1 + length] = START, IMAGE
    are_images = tokens == IMAGE
    if name == "SmolVLM":
        images["pixel_values"] = images["pixel_values"][:, None]
    if "Gemma" in name or "Qwen" in name:
        images["token_type_ids" if "Gemma" in name else "mm_token_type_ids"] = are_images.long()
    return {**batch, "input_ids": tokens, "labels": batch["labels"].masked_fill(are_images, -100), **images}


def features_of(output: Any) -> Any:
    """Features of images of a model's output, of which releases from 5.24 on have a list."""
    pooled = output.image_outputs.pooler_output if "image_outputs" in output else output.image_hidden_states
    return pooled[0] if isinstance(pooled, list) else pooled
