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
  and in place of an input of 16 bits its copy 4 h.
- results of both norms, which matrices need: 2 w h.
- queries, keys and values: w (q + 2 k). If one matrix makes all three and positions are rotary, w (q + k) more, because
  the values are a part of the matrix's result.
- if queries and keys are normed, as by the norms above, without results.
- result of attention w q, and the logarithms of its sums 4 a.
- feed-forward part: w f for each of gate, activated gate, other half and product. One kernel for the three keeps no
  activated gate. Without a gate w f before and after the activation function, and three more inside a composed one.

**Working memory** of a layer's backward, beyond what is kept, is largest where the feed-forward part begins: two
gradients of w f per token. If one kernel computes an activation function without a gate, it is one. In either case, the
gradient of the last matrix takes w h f beside one of them.

**Embedding**: keeps nothing. Its gradient takes w h V at the end of the backward.

**Head and loss**, bytes per token: the last norm as above. The logits are w V, and in 16 bits they have a copy of 4 V.
The logarithms of the softmax are 4 V, which are kept. Their backward needs 8 V beside them. The head's matrix needs w V
beside its own gradient of w h V. Fused kernels write into the copy, so they need w V beside it.

Not counted: dropout, and memory inside kernels. A mixture of experts counts as the
feed-forward parts that a token visits, each with a copy of its input and of its result.
"""

from dataclasses import dataclass
from functools import lru_cache

from ds_lgamp.cost.activations import ChunkBytes
from ds_lgamp.cost.units import ElementBytes
from ds_lgamp.planner.model import Model

_SINGLE = 4
"""Bytes of an element with 32 bits."""


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


@lru_cache(maxsize=256)
def layer_bytes(model: Model, micro_batch: int, tensor_ranks: int, software: Software) -> LayerBytes:
    """Returns the bytes of ``micro_batch`` sequences in one layer."""
    tokens, w = micro_batch * model.sequence_length, software.element.weights
    hidden, parts = model.hidden_size, tensor_ranks if software.splits_sequence else 1
    feed_forward = share(model.feed_forward_size, tensor_ranks) * model.experts_per_token
    kept, gradients, values = _feed_forward(model, software)
    routed = 2 * hidden * model.experts_per_token if model.experts > 1 else 0
    between = 2 * (_norm(model, software, hidden) + w * hidden) * tokens // parts
    within = (_attention(model, tensor_ranks, software) + w * (kept * feed_forward + routed)) * tokens
    # The gradient of the last matrix exists before its gradients are added up. Models of transformers have one tensor
    # of two matrices of all experts.
    matrices = 2 * model.experts if model.experts > 1 and not software.fused else 1
    matrix = matrices * w * hidden * share(model.feed_forward_size, tensor_ranks)
    working = max(w * gradients * feed_forward * tokens, w * feed_forward * tokens + matrix)
    result = w * hidden * tokens // parts
    # Matrices need all of the sequence, forward and backward, and keep a part.
    gathered = w * hidden * tokens if parts > 1 else 0
    forward = 3 * result + gathered + w * values * feed_forward * tokens
    return LayerBytes(result, between + within, forward, working + gathered)


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
    copy = single if w < _SINGLE else 0
    if software.fused:
        forward, loss_backward = logits, logits
    else:
        forward, loss_backward = logits + copy, 2 * single
    at_matrix = logits + matrix + whole + gathered - single
    return EndBytes(
        embedding=matrix + w * hidden * tokens,
        kept=before_loss + single,
        forward=forward,
        backward=max(loss_backward, at_matrix),
    )


def chunk_bytes(
    layer: LayerBytes, ends: EndBytes, layers: int, is_first: bool, is_last: bool, recompute: bool
) -> ChunkBytes:
    """Returns the bytes of one micro-batch on a chunk of ``layers`` layers."""
    kept = layer.kept * layers + (ends.kept if is_last else 0)
    beyond = [layer.working - (ends.kept if is_last else 0)]
    beyond += [ends.backward] if is_last else []
    beyond += [ends.embedding - kept] if is_first else []
    result = 0 if is_last else layer.result
    # The formula of memory.py counts a copy of the input, which the first layer keeps or frees.
    backward = kept + max(beyond) - (0 if is_first else layer.result)
    if not recompute:
        forward = kept + (ends.forward if is_last else 3 * layer.result) - (0 if is_first else layer.result)
        return ChunkBytes(result, forward, max(beyond), saved=kept)
    forward = max(layer.forward, ends.kept + ends.forward) if is_last else layer.forward
    return ChunkBytes(result, forward, backward)


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
    return _SINGLE * width + w * width + 4


def _attention(model: Model, tensor_ranks: int, software: Software) -> int:
    """Returns the bytes per token that attention keeps, without its norm."""
    w, heads = software.element.weights, share(model.attention_heads, tensor_ranks)
    queries = heads * model.head_size
    keys = share(model.key_value_heads, tensor_ranks) * model.head_size
    kept = w * (2 * queries + 2 * keys) + _SINGLE * heads
    if model.query_key_norms:
        kept += _norm(model, software, queries) + _norm(model, software, keys)
    if software.fused and not model.position_embeddings:
        kept += w * (queries + keys)
    return kept


def _feed_forward(model: Model, software: Software) -> tuple[int, int, int]:
    """Returns how many values of the feed-forward size are kept, how many of their gradients are needed at once, and
    how many a forward needs that keeps nothing."""
    if model.gated:
        return (3 if software.fused else 4), 2, 3
    if model.composed_activation and not software.fused:
        return 5, 2, 4
    return 2, 1, 2
