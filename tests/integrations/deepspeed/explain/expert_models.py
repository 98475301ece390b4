"""Models with experts that ranks may divide, as scripts train them: a PipelineModule of ``deepspeed.moe`` with its
data, and a model of transformers for AutoEP."""

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

VOCABULARY, LENGTH, WIDTH, EXPERTS, BLOCKS = 32, 4, 64, 4, 4


class Beginning(nn.Embedding):
    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(tokens), torch.zeros(())


class Block(nn.Module):
    """Adds what balances its experts to what came before."""

    def __init__(self, expert_ranks: int) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.moe = MoE(WIDTH, expert, EXPERTS, expert_ranks, capacity_factor=1.5, min_capacity=2, use_rts=False)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, before = given
        made, balance, _ = self.moe(self.inner(hidden).relu())
        return hidden + made, before + balance


class End(nn.Linear):
    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(given[0]), given[1]


class Tokens(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(number, number + LENGTH) % VOCABULARY
        return tokens, tokens


def loss_of(given: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    logits, balance = given
    return cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.1 * balance


def pipeline(config: dict[str, Any], expert_ranks: int, pipeline_ranks: int) -> Any:
    """Returns the engine of a PipelineModule, with its data."""
    blocks = [LayerSpec(Block, expert_ranks) for _ in range(BLOCKS)]
    layers = [LayerSpec(Beginning, VOCABULARY, WIDTH), *blocks, LayerSpec(End, WIDTH, VOCABULARY)]
    topology = PipeDataParallelTopology(pipeline_ranks, dist.get_world_size() // pipeline_ranks)
    model = PipelineModule(layers, topology=topology, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, training_data=Tokens())[0]


def mixtral(config: dict[str, Any]) -> Any:
    """Returns the engine of a script that calls it with batches."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": BLOCKS}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": EXPERTS}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


SCRIPT = """
import json, sys
import deepspeed
from tests.integrations.deepspeed.explain import expert_models

deepspeed.init_distributed("gloo")
kind, config, *sizes = sys.argv[1:]
getattr(expert_models, kind)(json.loads(config), *map(int, sizes))
"""
