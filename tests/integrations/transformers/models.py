"""Small models of transformers, made from configurations, and micro-batches for them."""

import random
from typing import Any

import peft
import torch
import transformers
from torch import nn

from tests.integrations.transformers import encoders, images
from tests.integrations.transformers.shrink import VOCABULARY, small

LENGTH = 10
CAUSAL, MASKED, PRETRAINING = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForPreTraining"
CHOOSING = "AutoModelForMultipleChoice"
ARCHITECTURES = {
    "GPT-2": ("GPT2Config", CAUSAL),
    "Llama": ("LlamaConfig", CAUSAL),
    "Qwen3": ("Qwen3Config", CAUSAL),
    "Mistral": ("MistralConfig", CAUSAL),
    "Gemma 2": ("Gemma2Config", CAUSAL),
    "Gemma 3": ("Gemma3TextConfig", CAUSAL),
    "GPT-NeoX": ("GPTNeoXConfig", CAUSAL),
    "Phi-3": ("Phi3Config", CAUSAL),
    "BERT": ("BertConfig", MASKED),
    "BERT in pretraining": ("BertConfig", PRETRAINING),
    "BERT with choices": ("BertConfig", CHOOSING),
    "OPT": ("OPTConfig", CAUSAL),
    "BLOOM": ("BloomConfig", CAUSAL),
    "GPT-J": ("GPTJConfig", CAUSAL),
    "RoBERTa": ("RobertaConfig", MASKED),
    "DistilBERT": ("DistilBertConfig", MASKED),
    "Falcon": ("FalconConfig", CAUSAL),
    "MPT": ("MptConfig", CAUSAL),
    "Mixtral": ("MixtralConfig", CAUSAL),
    "Qwen3-MoE": ("Qwen3MoeConfig", CAUSAL),
    "GPT-OSS": ("GptOssConfig", CAUSAL),
    "DeepSeek-V3": ("DeepseekV3Config", CAUSAL),
}
"""By name: the configuration, and the class that makes a model with a head."""


PLANNED = (
    "AXK1 AXK2 Afmoe Apertus Arcee AriaText BailingHybrid Beam Cohere Cohere2 Cohere2Moe Cwm DeepseekV2 DeepseekV3 "
    "DeepseekV32 DeepseekV4 Doge Dots1 Dots3NoteText Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe FlexOlmo Flint GPTNeoX "
    "Gemma Gemma2 Gemma3Text Gemma4UnifiedText Glm Glm4 Glm4Moe Glm4MoeLite GptOss Granite GraniteSWA HYV3 Helium "
    "HyperCLOVAX IQuestCoder InklingText InternLM3 Jais2 KimiLinear Kolibri1 Laguna Llama LongcatFlash Mellum "
    "MiMoV2Flash MiniCPM3 MiniMax MiniMaxM2 MiniMaxM3VLText Ministral3 Mistral Mixtral Olmo Olmo2 Olmo3 OlmoHybrid "
    "Phi Phi3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next Qwen3_5MoeText Qwen3_5Text SeedOss SmolLM3 SolarOpen "
    "Starcoder2 VaultGemma"
).split()
"""Architectures of causal language models with a pipeline plan, without the ending Config."""
BALANCED = {f"{name} with balance": name for name in ("Mixtral", "Qwen3-MoE", "GPT-OSS")}
"""Models whose loss balances experts, with the names of their architectures."""
DRAWN = [f"{name}Config" for name in random.Random(4).sample(PLANNED, 4)]


class FunctionalHead(nn.Module):
    """A head without parameters: it reads those of the embedding, which it does not call."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        # Not registered: it belongs to the model.
        self.__dict__["_embedding"] = embedding

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.__dict__["_embedding"].weight)


def make(name: str, head: str | None = None, **settings: Any) -> Any:
    """Makes a model with the same values on every rank.

    Args:
        name: a key of :data:`ARCHITECTURES`, ``images.MODELS`` or ``encoders.MODELS``, or the name of a configuration.
        head: the class that makes the model; default that of the architecture.
        settings: of the configuration.
    """
    if name in images.MODELS:
        return images.make(name)
    if name in encoders.MODELS:
        return encoders.make(name)
    if name == "Llama with LoRA":
        settings = peft.LoraConfig(r=2, init_lora_weights=False, modules_to_save=["lm_head"])
        return peft.get_peft_model(make("Llama"), settings)
    if name in BALANCED:
        return make(BALANCED[name], output_router_logits=True, router_aux_loss_coef=0.5, **settings)
    if name == "GPT-2 with dropout":
        return make("GPT-2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    if name == "Llama with a functional head":
        model = make("Llama")
        model.lm_head = FunctionalHead(model.model.embed_tokens)
        return model
    config_name, own_head = ARCHITECTURES.get(name, (name, CAUSAL))
    torch.manual_seed(0)
    return getattr(transformers, head or own_head).from_config(small(getattr(transformers, config_name), **settings))


def micro_batch_of(name: str, step: int, rank: int, number: int) -> dict[str, torch.Tensor]:
    """Makes a :func:`micro_batch` for the model ``name``, with a label for each sequence if it predicts those too, with
    choices if it chooses, and with images in the first one of a step if it takes them."""
    batch, head = micro_batch(step, rank, number), ARCHITECTURES.get(name, ("", ""))[1]
    if name in images.MODELS:
        return images.text(name, batch) if number else images.with_images(name, batch)
    if name in encoders.MODELS:
        return encoders.inputs_of(name, batch)
    if head == CHOOSING:
        # Two samples, with two choices each.
        both = {key: torch.stack([batch[key], batch[key].flip(1)], dim=1) for key in ("input_ids", "attention_mask")}
        return {**both, "labels": torch.tensor([number % 2, 1])}
    if head == PRETRAINING:
        batch["token_type_ids"] = torch.arange(LENGTH).ge(LENGTH // 2).long().expand(2, -1)
        batch["next_sentence_label"] = torch.tensor([number % 2, 1])
    return batch


def micro_batch(step: int, rank: int, number: int) -> dict[str, torch.Tensor]:
    """Makes two sequences, the first of which is padded."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * rank + number)
    tokens = torch.randint(4, VOCABULARY, (2, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, LENGTH - 3 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
