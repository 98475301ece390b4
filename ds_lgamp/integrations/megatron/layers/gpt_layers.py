"""A GPT model as a flat list of layers for DeepSpeed's PipelineModule, built from Megatron-core's parts.

A pipeline can be cut between any two of them:

    tokens [b, s] -> WordEmbedding -> PositionEmbedding -> TransformerBlock x L -> FinalNorm -> head -> logits [s, b, v]

The hidden state [s, b, h] travels between layers (sequence, micro-batch, hidden size: Megatron's order). A transformer
layer derives its causal mask and rotary angles from the sequence length. If attention stays inside documents, the
numbers of the documents [b, s] travel along, up to the last layer that needs them.

With tensor parallelism over T ranks, each rank has slices of the weights and of the logits, [s, b, v / T]. With
sequence parallelism, each rank has a part of the sequence, [s / T, b, h], between the layers from PositionEmbedding on.
"""

from __future__ import annotations

from typing import Literal

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.megatron.layers.experts import Balance, mean_balances, refuse_unsupported_experts
from ds_lgamp.integrations.megatron.layers.transformer_block import (
    Hidden,
    Rotary,
    TransformerBlock,
    TransformerImpl,
    document_numbers,
    document_positions,
    final_norm_of,
    packed,
    random_numbers,
    refuse_missing_engine,
    unpacked,
)
from ds_lgamp.runtime.logits import Entry, Logits, deferred
from ds_lgamp.runtime.pieces import Head

PositionType = Literal["rope", "learned_absolute"]
TIED_KEY, TIED_WEIGHT = "word_embeddings", "word_embeddings.weight"
"""The key of the tied module, and the name of its weight inside WordEmbedding."""

_REFUSED = {
    "multi_latent_attention": (False, "layers have plain self-attention"),
    "pipeline_model_parallel_size": (1, "DeepSpeed's PipelineModule places the layers"),
    "context_parallel_size": (1, "every rank sees the whole sequence"),
    "fp8": (None, "layers do not enter Transformer Engine's autocast and would compute in params_dtype"),
    "fp4": (None, "layers do not enter Transformer Engine's autocast and would compute in params_dtype"),
    "fp32_residual_connection": (False, "embeddings return params_dtype"),
    "qk_l2_norm": (False, "the specification of layers has no such norm"),
    "mtp_num_layers": (None, "there are no layers for several tokens"),
    "experimental_attention_variant": (None, "layers have plain self-attention"),
    "heterogeneous_block_specs": (False, "all layers are alike"),
}
_REFUSED_LOCALLY = {
    "window_size": (None, "PyTorch's attention has no window"),
    "softmax_type": ("vanilla", "PyTorch's attention has one softmax"),
    "layernorm_zero_centered_gamma": (False, "PyTorch's norms have no such weight"),
}
"""For fields of TransformerConfig, the value that works and why others do not: with any implementation, and with the
local implementation."""


def gpt_layer_specs(
    config: TransformerConfig,
    vocab_size: int,
    max_positions: int,
    position_type: PositionType,
    tie_embeddings: bool,
    *,
    rotary_base: int = 10000,
    rotary_percent: float = 1.0,
    end_of_document: int | None = None,
    reset_attention_mask: bool = False,
    reset_position_ids: bool = False,
    transformer_impl: TransformerImpl = "local",
) -> list[LayerSpec]:
    """Returns the layers of a GPT model, not yet built. DeepSpeed builds each on the pipeline rank that owns it.

    Args:
        tie_embeddings: lets the first and the last layer share one weight. DeepSpeed keeps the copies equal.
        end_of_document: the token that ends a document.
        reset_attention_mask: lets tokens see only their own document.
        reset_position_ids: restarts learned positions with every document. As in Megatron-core, rotary positions do not
            restart, because attention uses only the distance between two tokens of a document.
        transformer_impl: ``local`` for layers of plain PyTorch parts, ``transformer_engine`` for NVIDIA's.

    Raises ConfigError for settings that these layers cannot honour, such as gated layers under tensor parallelism, or a
    dispatcher of tokens to experts that needs a GPU.
    """
    _refuse_unsupported(config, transformer_impl)
    if end_of_document is None and (reset_attention_mask or reset_position_ids):
        reset = "reset_attention_mask" if reset_attention_mask else "reset_position_ids"
        raise ConfigError(f"{reset} is True, but end_of_document is None; name the token that ends documents")
    learned = position_type == "learned_absolute"
    restarts = reset_position_ids and learned
    embedded = (WordEmbedding, config, vocab_size, end_of_document if reset_attention_mask or restarts else None)
    if tie_embeddings:
        embedding = TiedLayerSpec(TIED_KEY, *embedded, tied_weight_attr=TIED_WEIGHT)
        head = TiedLayerSpec(TIED_KEY, *embedded, tied_weight_attr=TIED_WEIGHT, forward_fn=tied_logits)
    else:
        embedding = LayerSpec(*embedded)
        head = LayerSpec(LanguageModelHead, config, vocab_size)
    rotary = None if learned else Rotary(config.kv_channels, rotary_percent, rotary_base, config.rotary_interleaved)
    mask = AttnMaskType.arbitrary if reset_attention_mask else AttnMaskType.causal
    return [
        embedding,
        LayerSpec(PositionEmbedding, config, max_positions if learned else None, restarts, reset_attention_mask),
        *(
            LayerSpec(TransformerBlock, config, number, rotary, mask, transformer_impl)
            for number in range(1, config.num_layers + 1)
        ),
        LayerSpec(FinalNorm, config, transformer_impl),
        head,
    ]


class WordEmbedding(nn.Module):
    """Turns tokens [b, s] into the hidden state [s, b, h], and into the documents [b, s] if ``end_of_document`` is
    given. Only this part of the embedding can be tied to the head."""

    def __init__(self, config: TransformerConfig, vocab_size: int, end_of_document: int | None):
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size, config.hidden_size, init_method=config.embedding_init_method, config=config
        )
        self.end_of_document = end_of_document
        self.sequence_parallel = config.sequence_parallel
        self.loss_chunk: int | str | None = 0
        self.entry = _entry_of(config)

    def forward(self, tokens: Tensor) -> Hidden:
        hidden = self.word_embeddings(tokens).transpose(0, 1).contiguous()
        return packed(hidden, None if self.end_of_document is None else document_numbers(tokens, self.end_of_document))


class PositionEmbedding(nn.Module):
    """Adds learned positions to the hidden state [s, b, h], then applies dropout. Rotary positions enter in the layers.

    Args:
        max_positions: the number of learned positions; None without them.
        restarts: whether positions restart with every document.
        passes_documents: whether the following layers take the documents.
    """

    def __init__(self, config: TransformerConfig, max_positions: int | None, restarts: bool, passes_documents: bool):
        super().__init__()
        self.position_embeddings = None
        if max_positions is not None:
            self.position_embeddings = nn.Embedding(max_positions, config.hidden_size)
            config.embedding_init_method(self.position_embeddings.weight)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.restarts, self.passes_documents = restarts, passes_documents
        self.sequence_parallel = config.sequence_parallel

    def forward(self, inputs: Hidden) -> Hidden:
        hidden, documents = unpacked(inputs)
        if self.position_embeddings is not None:
            if documents is not None and self.restarts:
                positions = document_positions(documents)
            else:
                positions = torch.arange(hidden.shape[0], device=hidden.device)[None]
            hidden = hidden + self.position_embeddings(positions).transpose(0, 1)
        if self.sequence_parallel:
            hidden = scatter_to_sequence_parallel_region(hidden)
        with random_numbers(self.sequence_parallel and self.training and self.dropout.p > 0, hidden.device):
            hidden = self.dropout(hidden)
        return packed(hidden, documents if self.passes_documents else None)


class FinalNorm(nn.Module):
    """Normalises the hidden state [s, b, h] after the last transformer layer. Documents do not travel further."""

    def __init__(self, config: TransformerConfig, transformer_impl: TransformerImpl):
        super().__init__()
        self.norm = final_norm_of(config, transformer_impl)

    def forward(self, inputs: Hidden) -> Tensor:
        hidden, _documents = unpacked(inputs)
        return self.norm(hidden)


class LanguageModelHead(nn.Module):
    """Turns the hidden state [s, b, h] into logits [s, b, v] with a weight of its own."""

    def __init__(self, config: TransformerConfig, vocab_size: int):
        super().__init__()
        self.output_layer = ColumnParallelLinear(
            config.hidden_size, vocab_size, config=config, init_method=config.init_method, bias=False
        )
        self.loss_chunk: int | str | None = 0
        self.entry = _entry_of(config)

    def forward(self, hidden: Tensor) -> Tensor:
        logits = deferred(Head.linear(self.output_layer.weight, None), hidden, self.loss_chunk, self.entry)
        return self.output_layer(hidden)[0] if logits is None else logits


def tied_logits(embedding: WordEmbedding, hidden: Tensor) -> Tensor:
    """Returns the logits [s, b, v] of the hidden state [s, b, h], with the weight of the word embedding."""
    weight, entry = embedding.word_embeddings.weight, embedding.entry
    logits = deferred(Head.linear(weight, None), hidden, embedding.loss_chunk, entry)
    if logits is not None:
        return logits
    return nn.functional.linear(hidden if entry is None else entry.gather(hidden), weight)


def _entry_of(config: TransformerConfig) -> Entry | None:
    """Returns how the hidden state reaches this rank's slice of the head; None if there is one."""
    regions = gather_from_sequence_parallel_region, copy_to_tensor_model_parallel_region
    return Entry.of_slices(config.tensor_model_parallel_size, config.sequence_parallel, *regions)


def language_model_loss(logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the mean cross entropy over the tokens that count.

    Args:
        logits: [s, b, v].
        labels: target tokens [b, s], and the loss mask [b, s], which is 1 for tokens that count.
    """
    targets, loss_mask = (tensor.transpose(0, 1).contiguous() for tensor in labels)
    count = loss_mask.sum().clamp(min=1)
    if isinstance(logits, Logits):
        return logits.loss_in_all(targets, _losses_in_single, torch.float32, count, loss_mask)
    return (_losses_in_single(logits, targets) * loss_mask).sum() / count


language_model_loss.takes_deferred_logits = True  # type: ignore[attr-defined]


def _losses_in_single(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross entropies of logits [..., v], computed in 32 bits."""
    return vocab_parallel_cross_entropy(logits.float(), targets)


def auxiliary_losses(module: nn.Module) -> dict[str, dict[int, float]]:
    """Returns the losses that balance the experts of ``module``, such as ``engine.module``: the mean of each over the
    micro-batches of all data-parallel ranks since the last call, without its coefficient, by Megatron-core's name of it
    and the number of the layer. All ranks call it together. The loss of a training batch does not contain them."""
    own: dict[tuple[str, int], Balance] = {}
    for block in module.modules():
        if isinstance(block, TransformerBlock):
            own |= {(name, block.layer.layer_number): balance for name, balance in block.balances.items()}
            block.balances.clear()
    return mean_balances(own)


def _refuse_unsupported(config: TransformerConfig, transformer_impl: TransformerImpl) -> None:
    refused = _REFUSED | (_REFUSED_LOCALLY if transformer_impl == "local" else {})
    for key, (works, reason) in refused.items():
        value = getattr(config, key)
        if value != works:
            raise ConfigError(f"{key} is {value!r}, but {reason}; set it to {works!r}")
    if config.gated_linear_unit and config.tensor_model_parallel_size > 1:
        # A rank's slice of the first matrix has a slice of each half. A checkpoint would put them in the wrong order.
        raise ConfigError(
            f"gated_linear_unit is True and tensor_model_parallel_size {config.tensor_model_parallel_size}, but "
            "checkpoints would join the slices in the wrong order; set the first to False or the second to 1"
        )
    refuse_unsupported_experts(config, transformer_impl)
    refuse_missing_engine(transformer_impl)
