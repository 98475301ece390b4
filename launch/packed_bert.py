"""BERT for rows that hold several pairs. Its parameters are those of ``BertForPreTraining``."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForPreTraining
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput

ATTENTIONS = "eager", "sdpa"
"""The kinds of attention that take a mask of any form."""


class PackedBert(BertForPreTraining):
    """Pretrains on pairs that share rows. A pair begins where positions begin anew. Its tokens attend to each other
    alone, and its first one predicts whether its segments continue.

    Raises SystemExit if the model has another kind of attention.
    """

    def __init__(self, config: BertConfig) -> None:
        # None stands for one of these two.
        if config.is_decoder or config._attn_implementation not in (None, *ATTENTIONS):
            kind = "causal" if config.is_decoder else config._attn_implementation
            raise SystemExit(
                f"--pack needs a model whose attention takes any mask, and this one's is {kind}; "
                f"use an encoder with {' or '.join(ATTENTIONS)}, or leave out --pack"
            )
        super().__init__(config)

    def forward(
        self,
        input_ids: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        next_sentence_label: torch.Tensor | None = None,
    ) -> BertForPreTrainingOutput:
        """Returns loss and logits of both tasks.

        Args:
            input_ids, token_type_ids, position_ids: [rows, length]. Without positions, a row is one pair.
            labels: tokens to predict, [rows, length]; what is negative does not count.
            next_sentence_label: labels of pairs, [rows, places]; what is negative does not count.
        """
        if position_ids is None:
            named = {"labels": labels, "next_sentence_label": next_sentence_label}
            return super().forward(input_ids, token_type_ids=token_type_ids, **named)
        pairs = (position_ids == 0).cumsum(1)
        hidden = self.bert.embeddings(input_ids=input_ids, position_ids=position_ids, token_type_ids=token_type_ids)
        hidden = self.bert.encoder(hidden, attention_mask=within_pairs(pairs, hidden.dtype)).last_hidden_state
        scores, pair_scores = self.cls(hidden, self.pool(hidden, pairs, next_sentence_label.shape[1]))
        loss = cross_entropy(scores.flatten(0, 1), labels.flatten())
        pair_loss = cross_entropy(pair_scores.flatten(0, 1), next_sentence_label.flatten())
        return BertForPreTrainingOutput(
            loss=loss + pair_loss, prediction_logits=scores, seq_relationship_logits=pair_scores
        )

    def pool(self, hidden: torch.Tensor, pairs: torch.Tensor, places: int) -> torch.Tensor:
        """Returns what the pooler makes of the first token of every pair, [rows, places, hidden size]. Places without a
        pair get that of another token."""
        rows, length, _ = hidden.shape
        numbers = torch.arange(1, places + 1, device=pairs.device).repeat(rows, 1)
        first = torch.searchsorted(pairs, numbers).clamp(max=length - 1)
        tokens = hidden[torch.arange(rows, device=pairs.device)[:, None], first]
        # The pooler reads the first token of a row, so each token becomes a row.
        return self.bert.pooler(tokens.flatten(0, 1)[:, None]).unflatten(0, (rows, places))


def within_pairs(pairs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns what to add to the scores of attention, so that a token attends to those of its own pair alone.

    Args:
        pairs: the number of each token's pair in its row, [rows, length].
        dtype: that of the scores.

    Returns zeros and the lowest numbers, [rows, 1, length, length].
    """
    apart = pairs[:, None, :, None] != pairs[:, None, None, :]
    return torch.zeros(apart.shape, dtype=dtype, device=pairs.device).masked_fill(apart, torch.finfo(dtype).min)
