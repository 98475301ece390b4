"""Small models of transformers, made from configurations, and micro-batches for them."""

from typing import Any

import torch
import transformers

from tests.integrations.transformers.shrink import VOCABULARY, small

LENGTH = 10
CAUSAL, MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"
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
    "OPT": ("OPTConfig", CAUSAL),
    "BLOOM": ("BloomConfig", CAUSAL),
    "GPT-J": ("GPTJConfig", CAUSAL),
    "RoBERTa": ("RobertaConfig", MASKED),
    "DistilBERT": ("DistilBertConfig", MASKED),
    "Falcon": ("FalconConfig", CAUSAL),
    "MPT": ("MptConfig", CAUSAL),
    "Mixtral": ("MixtralConfig", CAUSAL),
    "Qwen3-MoE": ("Qwen3MoeConfig", CAUSAL),
}
"""By name: the configuration, and the class that makes a model with a head."""


def make(name: str, head: str | None = None, **settings: Any) -> Any:
    """Makes a model with the same values on every rank.

    Args:
        name: a key of :data:`ARCHITECTURES`, or the name of a configuration.
        head: the class that makes the model; default that of the architecture.
        settings: of the configuration.
    """
    config_name, own_head = ARCHITECTURES.get(name, (name, CAUSAL))
    torch.manual_seed(0)
    return getattr(transformers, head or own_head).from_config(small(getattr(transformers, config_name), **settings))


def micro_batch(step: int, rank: int, number: int) -> dict[str, torch.Tensor]:
    """Makes two sequences, the first of which is padded."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * rank + number)
    tokens = torch.randint(4, VOCABULARY, (2, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, LENGTH - 3 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
