"""A small BERT that trains on rows of several pairs, and on the same pairs one by one."""

import importlib
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForPreTraining

import ds_lgamp
from ds_lgamp.integrations.user_script import finish_engines
from testing import ROOT
from testing.deepspeed_rank import prepare_rank
from tests.integrations.deepspeed.plain.training import (
    MICRO_BATCHES,
    Course,
    before_step,
    configuration,
    initialize,
    own_gradients,
)

LENGTH, VOCABULARY = 64, 40
ROWS = [[[30, 20, 9], [25, 17, 12, 10]], [[5, 5, 5, 5], [64]]]
"""Tokens of every pair in the rows of two micro-batches: full rows and others, with places left and without."""


class Losses(NamedTuple):
    """The mean losses of both tasks."""

    tokens: torch.Tensor
    pairs: torch.Tensor


def script_module(name: str) -> Any:
    """Imports a module from beside the scripts."""
    sys.path.insert(0, str(ROOT / "launch"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "launch"))


def configure(**settings: Any) -> BertConfig:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=LENGTH, **dropout, **settings)


def make(packed: bool, **settings: Any) -> BertForPreTraining:
    """Makes the same model every time, whose weights are large enough for attention to matter."""
    torch.manual_seed(0)
    kind = script_module("packed_bert").PackedBert if packed else BertForPreTraining
    return kind(configure(initializer_range=0.3, **settings))


def pair_of(tokens: int, random: torch.Generator) -> dict[str, torch.Tensor]:
    """Makes a pair as masking returns it, in a row of its own."""

    def draw(limit: int) -> torch.Tensor:
        return torch.randint(1, limit, (LENGTH,), generator=random)

    place, labels = torch.arange(LENGTH), draw(VOCABULARY)
    # The first one is predicted, so that no pair is without.
    predicted = (place < tokens) & ((draw(5) == 1) | (place == 0))
    return {
        "input_ids": draw(VOCABULARY) * (place < tokens),
        "attention_mask": (place < tokens).long(),
        "token_type_ids": ((place > tokens // 2) & (place < tokens)).long(),
        "labels": labels.masked_fill(~predicted, -100),
        "next_sentence_label": torch.randint(2, (), generator=random),
    }


def rows_of(step: int, rank: int, number: int) -> list[list[dict[str, torch.Tensor]]]:
    """Returns the pairs in the rows of a micro-batch."""
    random = torch.Generator().manual_seed(100 * step + 10 * rank + number)
    return [[pair_of(tokens, random) for tokens in row] for row in ROWS[number]]


def micro_batch_of(rows: list[list[dict[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    packed = [script_module("bert_packing").packed(row, LENGTH, padding=0) for row in rows]
    return {name: torch.stack([row[name] for row in packed]) for name in packed[0]}


def one_by_one(model: BertForPreTraining, rows: list[list[dict[str, torch.Tensor]]]) -> Losses:
    """Returns the losses of the pairs in ``rows``, each of which the model sees without the others."""
    sums, tokens, pairs = [torch.zeros(()), torch.zeros(())], 0, 0
    for pair in (pair for row in rows for pair in row):
        output = model(**{name: tensor[None] for name, tensor in pair.items()})
        labels, label = pair["labels"], pair["next_sentence_label"][None]
        sums[0] = sums[0] + cross_entropy(output.prediction_logits[0], labels, reduction="sum")
        sums[1] = sums[1] + cross_entropy(output.seq_relationship_logits, label)
        tokens, pairs = tokens + int((labels >= 0).sum()), pairs + 1
    return Losses(sums[0] / tokens, sums[1] / pairs)


def train_alone(ranks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Computes a batch pair by pair. Returns the sum of every rank's losses, and the gradients of their mean."""
    model, losses = make(packed=False), []
    for rank in range(ranks):
        own = [sum(one_by_one(model, rows_of(0, rank, number))) for number in range(MICRO_BATCHES)]
        (sum(own) / (ranks * MICRO_BATCHES)).backward()
        losses.append(sum(own).item())
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


def train_on_rank(stage: int, block: dict[str, Any]) -> Course:
    """Trains a batch of packed rows on this rank."""
    prepare_rank()
    ds_lgamp.install()
    model, course = make(packed=True), Course([0.0], [])
    engine = initialize(model, configuration(stage, block))
    before_step(engine, lambda: course.gradients.append(own_gradients(model)))
    for number in range(MICRO_BATCHES):
        loss = engine(**micro_batch_of(rows_of(0, dist.get_rank(), number))).loss
        engine.backward(loss)
        engine.step()
        course.losses[0] += loss.item()
    finish_engines()
    return course
