"""Layers of Megatron-core under DeepSpeed compute head and loss in pieces of rows."""

from functools import partial
from typing import Any

import pytest
import torch

from testing.pieces import watch_pieces
from testing.ranks import run_on_ranks

PIECE, VOCABULARY, SEQUENCE = 5, 64, 16
BF16 = "bf16, with losses in 32 bits"


def train_on_rank(cases: dict[str, tuple[bool, dict[str, Any]]]) -> dict[str, tuple[list[float], Any, list[int]]]:
    """Trains by case. Returns losses, the loss of an evaluation with its logits' rows, and the rows of pieces."""
    import deepspeed
    import torch.distributed as dist
    from deepspeed.pipe import PipelineModule
    from megatron.core.transformer import TransformerConfig

    import ds_lgamp
    from ds_lgamp.integrations.megatron.layers.gpt_layers import gpt_layer_specs, language_model_loss
    from ds_lgamp.integrations.user_script import finish_engines
    from testing.deepspeed_rank import prepare_rank, quiet
    from tests.integrations.megatron.on_cpu import start_megatron

    prepare_rank()
    start_megatron()
    ds_lgamp.install()
    found = {}
    for name, (tied, block) in cases.items():
        with pytest.MonkeyPatch.context() as patch, quiet():
            pieces = watch_pieces(patch.setattr)
            torch.manual_seed(7)
            sizes = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "use_cpu_initialization": True}
            config = TransformerConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0)
            specs = gpt_layer_specs(config, VOCABULARY, SEQUENCE, "rope", tied)
            loss_fn = language_model_loss if name != "a loss of the script" else own_loss
            module = PipelineModule(specs, num_stages=dist.get_world_size(), loss_fn=loss_fn)
            settings = {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 4,
                "zero_optimization": {"stage": 2},
                "zero_allow_untested_optimizer": True,
                "bf16": {"enabled": name == BF16},
                "ds_lgamp": block,
            }
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
            losses = [float(engine.train_batch(iter(batches(step)))) for step in range(3)]
            evaluated = engine.eval_batch(iter(batches(9)))
            finish_engines()
        found[name] = losses, float(evaluated), pieces
    return found


def own_loss(logits: torch.Tensor, labels: Any) -> torch.Tensor:
    targets, _ = labels
    return torch.nn.functional.cross_entropy(logits.float().permute(1, 2, 0), targets)


def batches(step: int) -> list[Any]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (4, 2, SEQUENCE + 1), generator=generator)
    masks = torch.rand(4, 2, SEQUENCE, generator=generator).round()
    return [(each[:, :-1], (each[:, 1:].contiguous(), mask)) for each, mask in zip(tokens, masks)]


CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "untied": (False, {}),
    "tied": (True, {}),
    "a last chunk that is recomputed": (False, {"schedule": "gpipe"}),
    "nonfinite numbers are looked for": (False, {"nonfinite": "skip"}),
    "a loss of the script": (False, {}),
    BF16: (False, {}),
}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_layers_train_in_pieces_as_with_whole_logits(ranks):
    in_pieces, whole = (
        run_on_ranks(
            ranks,
            train_on_rank,
            {name: (tied, {**block, "loss_chunk": rows}) for name, (tied, block) in CASES.items()},
        )
        for rows in (PIECE, 0)
    )
    for name in CASES:
        used = [rows for found in in_pieces for rows in found[name][2]]
        assert not any(found[name][2] for found in whole)
        assert (max(used, default=0) == PIECE) == (name != "a loss of the script"), name
        for found, expected in zip(in_pieces, whole):
            # Rounded to 16 bits, losses of four would be off by up to a hundredth.
            near = partial(pytest.approx, rel=2e-4 if name == BF16 else 1e-6)
            assert found[name][0] == near(expected[name][0]), name
            assert found[name][1] == near(expected[name][1]), name
