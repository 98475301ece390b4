"""A Llama of transformers in a loop of one's own, trained by plain torch and under DeepSpeed with a block."""

from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
import transformers

import ds_lgamp
from benchmarks.gpt.contenders import MasterWeights, configuration
from benchmarks.gpt.model import SEED, batch_of, build_optimizer
from benchmarks.gpt.sizes import GptSize
from testing.deepspeed_rank import is_ours


def llama(size: GptSize, device: torch.device) -> Any:
    """Makes the model in bf16 on ``device``, with the same values every time."""
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=size.sequence,
    )
    with device:
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def token_batches(size: GptSize, device: torch.device) -> list[torch.Tensor]:
    """Returns the tokens [b, s] of every micro-batch. The model shifts them to make its labels."""
    return [tokens for tokens, _ in batch_of(size, device)]


class PlainLlama:
    """A bare loop of plain torch, with the same recomputation as transformers' own."""

    def __init__(self, size: GptSize, recompute: str, device: torch.device) -> None:
        self.batch, self.model = token_batches(size, device), llama(size, device)
        if recompute == "full":
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.parameters = sum(weight.numel() for weight in self.model.parameters())
        self.masters = MasterWeights(self.model.parameters(), build_optimizer)

    def step(self) -> torch.Tensor:
        losses = []
        for tokens in self.batch:
            loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
            (loss / len(self.batch)).backward()
            losses.append(loss.detach())
        self.masters.step()
        return torch.stack(losses).mean()


class LayeredLlama:
    """ds_lgamp under a script that calls ``engine(...)``. The arguments are those of
    :class:`benchmarks.gpt.contenders.Layered`."""

    def __init__(
        self, size: GptSize, recompute: str, device: torch.device, stage: int, more: Mapping[str, Any]
    ) -> None:
        self.batch, model = token_batches(size, device), llama(size, device)
        self.parameters = sum(weight.numel() for weight in model.parameters())
        ds_lgamp.install()
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=build_optimizer(model.parameters()),
            config=configuration(size, stage) | {"ds_lgamp": {"recompute": recompute, **more["ds_lgamp"]}},
        )
        assert is_ours(self.engine)
        self.engine.train()

    def step(self) -> torch.Tensor:
        losses = []
        for tokens in self.batch:
            loss = self.engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()
