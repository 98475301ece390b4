"""What one micro-batch takes in the layers of a transformer.

Korthikanti et al. (arXiv 2205.05198, section 4) count 34 s b h + 5 a s^2 b bytes that autograd keeps of a layer, with
16-bit elements, dropout and attention that stores its scores. Fused attention (FlashAttention, PyTorch's
scaled_dot_product_attention) stores none, and without dropout there are no masks: 32 s b h remain. On T tensor-parallel
ranks they are s b h (8 + 24 / T), and 32 s b h / T if these split the sequence between their matrices. This module
counts the same tensors one by one, so it knows grouped queries, gated feed-forward parts, RMSNorm, 32-bit elements, and
what models of transformers keep because they compute by several operations what one kernel could.

Symbols: h hidden size, w bytes per element; on one tensor-parallel rank q and k the widths of queries and of keys, a
attention heads, f the feed-forward size, V the vocabulary.

**Kept of a layer**, bytes per token:

- both norms: their input w h and their statistics. RMSNorm by several operations keeps the normalised values w h too,
  4 h if it multiplies them by its weights in 32 bits, and in place of an input of 16 bits its copy 4 h.
- results of both norms, which matrices need: 2 w h.
- queries, keys and values: w (q + 2 k). If one matrix makes all three and positions are rotary, w (q + k) more, because
  the values are a part of the matrix's result.
- if queries and keys are normed, as by the norms above, without results.
- result of attention w q, and the logarithms of its sums 4 a. Attention by several operations, with sinks, keeps no
  logarithms, but keys and values as wide as queries, w a (s + 1) of probabilities for sequences of s tokens, and 8 a.
- latent attention: vectors of low rank, each with a norm and its result; queries and keys w q each; what one matrix
  makes of keys and values; and the result twice, the second time as rows.
- feed-forward part: w f for each of gate, activated gate, other half and product. One kernel for the three keeps no
  activated gate. Clamped gates, as of GPT-OSS, keep seven. Without a gate w f before and after the activation function,
  and three more inside a composed one.
- experts: the same for each that a token visits, with a copy of its input and of its result, and four numbers of 8
  bytes that say where it goes; 4 for each expert of the layer. A router in 32 bits keeps 4 h more, and a copy of its
  weights.

**Working memory** of a layer's backward, beyond what is kept, is largest where the feed-forward part begins: two
gradients of w f per token. If one kernel computes an activation function without a gate, it is one. In either case, the
gradient of the last matrix takes w h f beside one of them. With experts, the matrices of all that a rank has are one
tensor, and so are their gradients. They need w h f for each expert beside one gradient of w f for each visit, or twice
that for gates, when two of the values of w f are gone. Or, when results are weighted, three gradients of w h for each
visit. Attention by several operations needs two tensors of scores, when the feed-forward part keeps nothing any more.

**Two parts** of a backward (:mod:`ds_lgamp.runtime.split_backward`): the first one makes no gradients of weights. It
leaves the inputs of a layer's matrices and the gradients of their results: w (4 h + 2 q + 2 k) per token, and w f for
each matrix of the feed-forward part. A head in pieces leaves nothing. Layers that tensor-parallel ranks share, and
experts, are not counted, because they compute both parts at once.

**Embedding**: keeps nothing. Its gradient takes w h V at the end of the backward.

**Head and loss**, bytes per token: the last norm as above. The logits are w V, and in 16 bits they have a copy of 4 V.
The logarithms of the softmax are 4 V, which are kept. Their backward needs 8 V beside them. The head's matrix needs w V
beside its own gradient of w h V. Fused kernels write into the copy, so they need w V beside it.

In pieces of c rows, as the engine computes head and loss of large vocabularies, logits take 12 c V bytes at most, in
the forward: the logarithms of the softmax and two gradients. Fused kernels, and the cross entropy of Megatron-core for
slices of the vocabulary, write all of them into the copy of 4 c V. What is kept are the gradients of rows, w h per
token, and of the head's matrix, 4 h V. In 16 bits the backward makes a copy of the latter, w h V.

**Adapters** of rank r beside frozen weights (LoRA): each matrix keeps w r per token more, and its forward has three
results at once: of the matrix, of the adapter scaled, and their sum. Norms keep no normalised values, a head keeps no
input, and frozen matrices have no gradients. The first norm of the model keeps nothing, because the embedding has no
gradient.

Not counted: dropout, and memory inside kernels. Tokens count as spread evenly over experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ds_lgamp.cost.activations import ChunkBytes, rows_of_piece
from ds_lgamp.cost.traffic import hidden_bytes
from ds_lgamp.cost.units import ElementBytes
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.model import LatentAttention, Model

_SINGLE = 4
"""Bytes of an element with 32 bits."""
_NUMBER = 8
"""Bytes of a whole number in torch."""


@dataclass(frozen=True)
class Software:
    """What trains the model: it decides what is kept, and in how many bytes."""

    element: ElementBytes = ElementBytes(weights=2, gradients=2, optimizer=8)
    """The default is bf16 with AdamW. As in DeepSpeed, gradients accumulate in the type of the weights."""
    fused: bool = False
    """Whether one kernel computes a norm, an activation function or the loss, as in Megatron-core with Transformer
    Engine. Models of transformers compute RMSNorm, gates and some activation functions by several operations."""
    splits_sequence: bool = False
    """Whether each tensor-parallel rank has a part of the sequence between matrices (sequence parallelism)."""
    all_to_all: bool = False
    """Whether an all-to-all replaces the reduce-scatter, as on gloo."""
    loss_chunk: int | str | None = "auto"
    """For how many rows at a time the engine computes head and loss, as the key of the block."""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one micro-batch in a layer on one tensor-parallel rank."""

    result: int
    kept: int
    """Kept by autograd from the forward to the backward, with the layer's input if that is kept."""
    forward: int
    """Peak of a forward of which nothing is kept."""
    working: int
    """The most that the backward needs beyond ``kept``."""
    making: int
    """The most that the forward needs beyond ``kept``."""
    waiting: int = 0
    """Of a backward that has two parts: what the first one leaves for the second."""
    first_part: int = 0
    """The most that the first part needs beyond ``kept``."""
    second_part: int = 0
    """The most that the second part needs beyond what waits, if the layer is the first one of its chunk."""


@dataclass(frozen=True)
class EndBytes:
    """Bytes of one micro-batch at the ends of the model, on one tensor-parallel rank."""

    embedding: int
    """Peak at the end of the backward, when layers keep nothing any more."""
    kept: int
    """Kept by the last norm, the head and the loss."""
    forward: int
    """Peak of the forward beyond ``kept``."""
    backward: int
    """Peak of the backward beyond ``kept``."""
    waiting: int = 0
    """Of a backward that has two parts: what the head's product leaves for the second one. In pieces, the head computes
    both parts at once."""
    unkept: int = 0
    """What the first layer keeps less than others, because its norm gets no gradient from a frozen embedding."""


class _Part(NamedTuple):
    """Bytes of one micro-batch in the attention or in the feed-forward part of a layer, without its norm."""

    kept: int
    working: int
    """The most that the backward needs beyond ``kept``."""
    forward: int
    """Peak of a forward of which nothing is kept, beyond results of the layer's size."""
    making: int = 0
    """The most that a forward needs beyond ``kept``, and beyond such results."""


@lru_cache(maxsize=256)
def layer_bytes(model: Model, micro_batch: int, tensor_ranks: int, software: Software) -> LayerBytes:
    """Returns the bytes of ``micro_batch`` sequences in one layer."""
    tokens, w = micro_batch * model.sequence_length, software.element.weights
    hidden, parts = model.hidden_size, tensor_ranks if software.splits_sequence else 1
    between = 2 * (_norm(model, software, hidden) + w * hidden) * tokens // parts
    between += w * model.adapters * len(model.linear_layers) * tokens
    attention = _attention(model, tokens, tensor_ranks, software)
    feed_forward = _experts if model.experts > 1 else _feed_forward
    wide = feed_forward(model, tokens, tensor_ranks, software)
    result = w * hidden * tokens // parts
    # Matrices need all of the sequence, forward and backward, and keep a part.
    gathered = w * hidden * tokens if parts > 1 else 0
    queries, keys = model.attention_heads * model.head_size, model.key_value_heads * model.head_size
    in_attention = 2 * hidden + 2 * queries + 2 * keys
    size, (_, gradients, _) = model.feed_forward_size, _values(model, software)
    return LayerBytes(
        result,
        between + attention.kept + wide.kept,
        3 * result + gathered + max(attention.forward, wide.forward),
        # The backward of the attention begins when the feed-forward part keeps nothing any more.
        max(wide.working, attention.working - wide.kept) + gathered,
        max((4 if model.adapters else 3) * result, wide.making, attention.making - wide.kept),
        waiting=w * (in_attention + 2 * hidden + model.matrices * size) * tokens,
        first_part=w * gradients * size * tokens,
        # The second part begins with the attention, and frees what a product has needed.
        second_part=w * hidden * max(queries + 2 * keys, size - in_attention * tokens // hidden),
    )


@lru_cache(maxsize=256)
def end_bytes(model: Model, micro_batch: int, tensor_ranks: int, software: Software) -> EndBytes:
    """Returns the bytes of ``micro_batch`` sequences in embedding, head and loss."""
    tokens, w = micro_batch * model.sequence_length, software.element.weights
    vocabulary, hidden = share(model.vocabulary_size, tensor_ranks), model.hidden_size
    parts = tensor_ranks if software.splits_sequence else 1
    # A tied head keeps the whole sequence that it gathers, another one gathers it anew in its backward.
    whole = w * hidden * tokens
    gathered = whole if parts > 1 and not model.tied_embeddings else 0
    result = whole if model.tied_embeddings else whole // parts
    before_loss = _norm(model, software, hidden) * tokens // parts + result
    logits, single, matrix = w * vocabulary * tokens, _SINGLE * vocabulary * tokens, w * hidden * vocabulary
    embedding, unkept, norm = matrix + w * hidden * tokens, 0, 0
    if model.adapters:
        if not model.biases:
            # The backward of the last norm by several operations, in 32 bits. Others hide behind what layers free.
            norm = 4 * _SINGLE * hidden * tokens + (2 if w < _SINGLE else 1) * whole
        # Embedding and head are frozen, and the head needs no input then.
        before_loss, matrix, embedding, unkept = before_loss - result, 0, 0, _norm(model, software, hidden) * tokens
    copy = single if w < _SINGLE else 0
    piece = rows_of_piece(software.loss_chunk, tokens, hidden, vocabulary)
    if piece < tokens:
        each = (w if copy else 0) + _SINGLE if software.fused else 3 * _SINGLE
        working = whole + each * piece * vocabulary
        return EndBytes(
            embedding,
            kept=_norm(model, software, hidden) * tokens // parts
            + whole
            + (0 if model.adapters else _SINGLE * hidden * vocabulary),
            forward=working,
            # Of a recomputed chunk, the repeated forward counts.
            backward=max(working, matrix if copy else 0, norm),
            unkept=unkept,
        )
    if software.fused:
        forward, loss_backward = logits, logits
    else:
        forward, loss_backward = logits + copy, 2 * single
    at_matrix = logits + matrix + whole + gathered - single
    return EndBytes(
        embedding,
        kept=before_loss + single,
        forward=forward,
        backward=max(loss_backward, at_matrix, norm - single),
        waiting=whole + logits,
        unkept=unkept,
    )


def chunk_bytes(
    layers: Sequence[LayerBytes],
    ends: EndBytes,
    counts: Sequence[int],
    is_first: bool,
    is_last: bool,
    recompute: bool,
    split: bool = False,
) -> ChunkBytes:
    """Returns the bytes of one micro-batch on a chunk.

    Args:
        layers: a layer of every kind, in the order of the kinds.
        counts: how many layers of each kind the chunk has.
        split: whether its backward has two parts.
    """
    own = [(count, layer) for count, layer in zip(counts, layers) if count]
    kept = sum(count * layer.kept for count, layer in own) + (ends.kept if is_last else 0)
    kept -= ends.unkept if is_first else 0
    result, freed = own[0][1].result, ends.kept if is_last else 0
    beyond, making = [], own[-1][1].making - freed
    waiting, second_part = ends.waiting if is_last and split else 0, own[0][1].second_part if split else 0
    for count, layer in reversed(own):
        # The backward of a kind begins when later layers keep nothing any more.
        beyond.append((layer.first_part if split else layer.working) + waiting - freed)
        freed += count * layer.kept
        waiting += count * layer.waiting if split else 0
    beyond += [waiting - freed] if split else []
    beyond += [ends.backward] if is_last else []
    beyond += [ends.embedding - kept] if is_first else []
    # The formula of memory.py counts a copy of the input, which the first layer keeps or frees.
    of_input = 0 if is_first else result
    passed_on = 0 if is_last else result
    if not recompute:
        forward = kept + (max(ends.forward, making) if is_last else making) - of_input
        return ChunkBytes(passed_on, forward, max(beyond), kept, waiting=waiting, second_part=second_part)
    forward = max(layer.forward for _, layer in own)
    return ChunkBytes(
        passed_on,
        max(forward, ends.kept + ends.forward) if is_last else forward,
        kept + max(*beyond, making) - of_input,
        waiting=waiting,
        second_part=second_part,
    )


def share(size: int, ranks: int) -> int:
    """Returns the larger of the parts of ``size`` on ``ranks``."""
    return -(-size // ranks)


def _norm(model: Model, software: Software, width: int) -> int:
    """Returns the bytes per token that a norm keeps, with its input and without its result."""
    w = software.element.weights
    if model.biases:
        return w * width + 8
    if software.fused:
        return w * width + 4
    # Frozen weights need no normalised values.
    normalised = 0 if model.adapters else _SINGLE if "norms" in model.in_single else w
    return _SINGLE * width + normalised * width + 4


def _attention(model: Model, tokens: int, tensor_ranks: int, software: Software) -> _Part:
    """Returns the bytes of attention."""
    w, heads = software.element.weights, share(model.attention_heads, tensor_ranks)
    queries, results = heads * model.head_size, heads * model.value_size
    keys = share(model.key_value_heads, tensor_ranks) * model.head_size
    if model.attention_masks and not software.fused:
        # Keys and values are copied for every head, and each row keeps the number of its largest score.
        scores = w * heads * (model.sequence_length + 1)
        kept = w * (2 * queries + 2 * results) + scores + _NUMBER * heads
        return _Part(kept * tokens, 2 * scores * tokens, 3 * scores * tokens, 2 * scores * tokens)
    kept = w * (2 * queries + 2 * keys) + _SINGLE * heads
    if model.latent is not None:
        kept = w * (2 * queries + 2 * results) + _SINGLE * heads + _latent(model, model.latent, software)
    if model.query_key_norms:
        kept += _norm(model, software, queries) + _norm(model, software, keys)
    if software.fused and not model.position_embeddings:
        kept += w * (queries + keys)
    return _Part(kept * tokens, 0, 0)


def _latent(model: Model, latent: LatentAttention, software: Software) -> int:
    """Returns the bytes per token that latent attention keeps of what makes queries, keys and values."""
    w, ranks = software.element.weights, (latent.query_rank, latent.key_value_rank)
    low = sum(_norm(model, software, rank) + w * rank for rank in ranks if rank)
    # Values are a part of what one matrix makes.
    return low + w * (model.key_value_width - model.key_value_heads * latent.rotary_size)


def _feed_forward(model: Model, tokens: int, tensor_ranks: int, software: Software) -> _Part:
    """Returns the bytes of a feed-forward part without experts."""
    w, size = software.element.weights, share(model.feed_forward_size, tensor_ranks)
    kept, gradients, values = _values(model, software)
    matrix, making = w * model.hidden_size * size, 0
    if model.adapters:
        # The matrix is frozen. One and its adapter have three results at once, beside a gate before and after the
        # activation function.
        gates = 2 if model.gated else 0
        matrix, values, making = 0, max(values, gates // 2 + 3), max(0, gates + 3 - kept)
    return _Part(
        w * kept * size * tokens,
        # The gradient of the last matrix exists before its gradients are added up.
        max(w * gradients * size * tokens, w * size * tokens + matrix),
        w * values * size * tokens,
        w * making * size * tokens,
    )


def _experts(model: Model, tokens: int, tensor_ranks: int, software: Software) -> _Part:
    """Returns the bytes of experts, of what chooses among them, and of the part that every token visits."""
    w, size = software.element.weights, share(model.feed_forward_size, tensor_ranks)
    routed, hidden = tokens * model.experts_per_token, model.hidden_size
    kept, _, values = _values(model, software)
    # Weights of experts in 32 bits make their weighted results such. AutoEP, which divides experts, has a router of its
    # own.
    weighted = _SINGLE if "router" in model.in_single and model.expert_ranks == 1 else w
    copy = _SINGLE * hidden if weighted > w else 0
    choice = (copy + _SINGLE * model.experts) * tokens + copy * model.experts + 4 * _NUMBER * routed
    each = w * (kept * size + 2 * hidden) * routed
    shared = replace(model, feed_forward_size=model.shared_size or 1)
    beside = _feed_forward(shared, tokens, tensor_ranks, software) if model.shared_size else _Part(0, 0, 0)
    # What every token visits comes last, so its backward is over when that of the experts begins.
    over = beside.kept - w * hidden * tokens if model.shared_size else 0
    # Fused kernels add to the gradient of one expert after another.
    matrix, gate = w * hidden * size * (1 if software.fused else model.own_experts), model.matrices - 1
    working = max(
        3 * weighted * hidden * routed,
        w * size * routed + matrix,
        # The gradient of gate and other half is one tensor. Two of the kept values are gone by then, and two became
        # gradients.
        gate * matrix - 2 * w * size * routed,
    )
    forward = max(w * (values * size + hidden), 2 * (w + weighted) * hidden) * routed
    # Biases of the first matrices, and one value that is not kept, before there are results.
    making = w * (3 * size - hidden) * routed - w * hidden * tokens if values > 4 else 0
    return _Part(choice + each + beside.kept, max(working - over, beside.working), max(forward, beside.forward), making)


def _values(model: Model, software: Software) -> tuple[int, int, int]:
    """Returns how many values of the feed-forward size are kept, how many of their gradients are needed at once, and
    how many a forward needs that keeps nothing."""
    if model.gated and model.composed_activation and not software.fused:
        return 7, 2, 10
    if model.gated:
        return (3 if software.fused else 4), 2, 3 if model.experts == 1 else 4
    if model.composed_activation and not software.fused:
        return 5, 2, 4
    return 2, 1, 2


def chunk_bytes_of(model: Model, configuration: Configuration, software: Software) -> list[ChunkBytes]:
    """Returns the bytes of one micro-batch on each chunk."""
    sizes = configuration.micro_batch, configuration.tensor_ranks, software
    model = model.divided(configuration.expert_ranks)
    ends, of_kinds = end_bytes(model, *sizes), [layer_bytes(kind, *sizes) for _, kind in model.kinds]
    last, spec = configuration.chunks - 1, configuration.spec
    layers = configuration.kinds_of_chunks(model)
    sorts = [
        (layers[chunk], chunk == 0, chunk == last, chunk in spec.recomputed_chunks, chunk in spec.split_chunks)
        for chunk in range(last + 1)
    ]
    made = {sort: chunk_bytes(of_kinds, ends, *sort) for sort in set(sorts)}
    if configuration.recompute == "auto":
        for sort, whole in made.items():
            kept = chunk_bytes(of_kinds, ends, *sort[:3], recompute=False) if sort[3] else None
            made[sort] = replace(whole, kept=kept)
    for sort, whole in made.items():
        elements = whole.result // software.element.weights
        made[sort] = replace(whole, sent=hidden_bytes(elements, configuration.activation_dtype))
    return [made[sort] for sort in sorts]
