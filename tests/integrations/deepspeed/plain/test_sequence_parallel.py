"""Ranks that share a sequence by DeepSpeed's Ulysses (``UlyssesSPAttentionHF``)."""

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.utils import groups as stock_groups
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import ds_lgamp
from ds_lgamp.config import ConfigError
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.slow import slow_except

VOCABULARY, SEQUENCE, STEPS, MICRO_BATCHES, SAMPLES = 64, 16, 3, 2, 2
ALL = {"outputs": "all"}


def make_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads, attn_implementation="sdpa"))


def sequences(groups: int) -> tuple[Tensor, Tensor]:
    """Returns tokens, and the one that follows each: [steps, groups, micro-batches, samples, sequence]."""
    shape = (STEPS, groups, MICRO_BATCHES, SAMPLES, SEQUENCE)
    tokens = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
    following = functional.pad(tokens, (0, 1), value=-100)[..., 1:]
    # Parts of a sequence have unlike numbers of tokens that count.
    following[..., :3] = -100
    return tokens, following


def summed_loss(logits: Tensor, following: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")


def train_in_one_process(groups: int) -> list[float]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for tokens, following in zip(*sequences(groups)):
        total = 0.0
        for each, after in zip(tokens.flatten(0, 1), following.flatten(0, 1)):
            loss = summed_loss(model(each).logits, after) / (after != -100).sum() / (groups * MICRO_BATCHES)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


class SumOfShares(torch.autograd.Function):
    """The sum of what the ranks of a group have, in whose backward every rank counts the gradients of all, as in that
    of ``torch.distributed.nn.functional.all_gather``, which on gloo works for one group only."""

    @staticmethod
    def forward(context: Any, share: Tensor, group: Any) -> Tensor:
        context.group, total = group, share.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=context.group)
        return total, None


def initialize(stage: int, block: dict[str, Any], size: int, key: int | None = None) -> tuple[Any, Any]:
    """Returns the engine, and the mpu of ``size`` ranks that share a sequence; None for 1."""
    ds_lgamp.install()
    prepare_rank()
    model = make_model()
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", size, micro_batch_size=SAMPLES)
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "sequence_parallel_size": key or size,
        "ds_lgamp": block,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)[0], mpu


def train_on_ranks(pipeline_ranks: int, stage: int, size: int) -> list[float]:
    engine, mpu = initialize(stage, {**ALL, "pipeline_ranks": pipeline_ranks}, size)
    group, groups = mpu.get_sequence_parallel_group(), dist.get_world_size() // size
    assert engine.train_batch_size() == SAMPLES * MICRO_BATCHES * groups
    # The Trainer asks DeepSpeed for the group.
    assert stock_groups._get_sequence_parallel_group() is group
    share, part = dist.get_rank() // size, dist.get_rank() % size
    place = torch.arange(SEQUENCE).expand(SAMPLES, -1).chunk(size, 1)[part]
    losses = []
    for step in zip(*sequences(groups)):
        total = torch.zeros(())
        for tokens, following in zip(*(each[share] for each in step)):
            own, after = (each.chunk(size, 1)[part] for each in (tokens, following))
            logits = engine(input_ids=own, position_ids=place).logits
            loss = SumOfShares.apply(summed_loss(logits, after), group) / (following != -100).sum()
            engine.backward(loss)
            engine.step()
            total += loss.detach() / MICRO_BATCHES
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


LAYOUTS = [(1, 2, 3), (2, 4, 3), (1, 4, 1), (1, 2, 0), (2, 4, 2), (1, 4, 3)]


@pytest.mark.parametrize(("pipeline", "ranks", "stage"), slow_except(LAYOUTS[:2], LAYOUTS, several=True))
def test_two_ranks_that_share_sequences_have_the_losses_of_one_process(pipeline, ranks, stage):
    expected = train_in_one_process(ranks // 2)
    for losses in run_on_ranks(ranks, train_on_ranks, pipeline, stage, 2):
        assert losses == pytest.approx(expected, rel=1e-5)


def refused(block: dict[str, Any], size: int, key: int) -> str:
    with pytest.raises(ConfigError) as error:
        initialize(3, block, size, key)
    return str(error.value)


@pytest.mark.parametrize(
    ("block", "size", "key", "message"),
    [
        ({}, 2, 2, "2 ranks share a sequence, whose loss only the script can compute; set ds_lgamp.outputs to 'all'"),
        (ALL, 1, 2, "sequence_parallel_size is 2, but deepspeed.initialize got no mpu by which 2 ranks share"),
        ({**ALL, "pipeline_ranks": 2}, 2, 2, "are not among the 1 data-parallel ranks that hold the same layers"),
    ],
    ids=["no loss of its own", "no mpu", "other layers"],
)
def test_sequences_that_cannot_be_shared_are_refused(block, size, key, message):
    for told in run_on_ranks(2, refused, block, size, key):
        assert message in told
