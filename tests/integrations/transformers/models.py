"""Small models of transformers, made from configurations, and micro-batches for them."""

from typing import Any

import torch
import transformers

VOCABULARY = 64
LENGTH = 10
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2(dropout: float = 0.0) -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS))


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, num_attention_heads=4, **NO_DROPOUT))


MODELS = {"GPT-2": gpt2, "Llama": llama, "BERT": bert}


def make(name: str) -> Any:
    """Makes a model with the same values on every rank."""
    torch.manual_seed(0)
    return MODELS[name]()


def micro_batch(step: int, rank: int, number: int) -> dict[str, torch.Tensor]:
    """Makes two sequences, the first of which is padded."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * rank + number)
    tokens = torch.randint(4, VOCABULARY, (2, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, LENGTH - 3 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
