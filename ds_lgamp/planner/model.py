"""What costs depend on in a transformer: its sizes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ds_lgamp.fields import count

MOST_LAYERS = 500
"""Each layer may be a chunk, so the time of a search grows with their square: it takes a minute for so many."""


AUTOEP, MEGATRON = "autoep", "megatron"
"""What lets ranks divide experts: DeepSpeed's AutoEP, for models of transformers that it has a preset for, and
Megatron-core."""


class LatentAttention(NamedTuple):
    """Attention whose queries, keys and values are made of vectors of low rank (arXiv 2405.04434, section 2.1)."""

    query_rank: int
    """0: queries are made of the hidden state."""
    key_value_rank: int
    rotary_size: int
    """Values of a head's query that have positions, and of the key that all heads share."""
    value_size: int
    """Of a head. ``Model.head_size`` is that of queries and keys."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a transformer. Raises ValueError if they contradict each other."""

    name: str
    layers: int
    hidden_size: int
    attention_heads: int
    vocabulary_size: int
    sequence_length: int
    """Tokens per sequence in training."""
    key_value_heads: int
    head_size: int
    feed_forward_size: int
    gated: bool = False
    """Whether the feed-forward part has a third matrix, as SwiGLU and GeGLU have."""
    experts: int = 1
    """Feed-forward parts per layer; a router chooses among them."""
    experts_per_token: int = 1
    expert_extras: tuple[int, ...] = ()
    """Elements of each tensor of an expert beyond its matrices and what ``biases`` says. They take memory, but no time
    worth counting."""
    divided_by: str = ""
    """What lets data-parallel ranks divide the experts of a layer: :data:`AUTOEP` or :data:`MEGATRON`; empty if nothing
    does."""
    expert_ranks: int = 1
    """Ranks that divide the experts of a layer, of which each then has a part. See :meth:`divided`."""
    shared_size: int = 0
    """The size of the feed-forward part that every token visits beside its experts; 0 if there is none."""
    dense_layers: int = 0
    """How many of the first layers have one feed-forward part, of ``dense_size``, and no experts."""
    dense_size: int = 0
    latent: LatentAttention | None = None
    rotary_size: int = 0
    """Sines of a position in the table of rotary positions, and cosines; 0: as many as ``head_size``."""
    attention_masks: int = 0
    """If models of transformers compute attention by several operations, and so keep all scores: how many different
    masks they add. 0 if one kernel computes attention."""
    in_single: tuple[str, ...] = ()
    """What models of transformers compute in 32 bits besides the statistics of norms: ``norms``, the products with
    their weights; ``router``, what chooses experts."""
    tied_embeddings: bool = True
    """Whether the head uses the weights of the embedding."""
    position_embeddings: int = 0
    """Learned positions and token types; 0 for rotary and other tables without parameters."""
    biases: bool = True
    """Whether linear layers and norms have biases."""
    layer_extras: tuple[int, ...] = ()
    """Elements of each tensor of a layer beyond its matrices, all biases or none, and two norms: norms of queries,
    biases of the attention alone. They take memory, but no time worth counting."""
    extras: tuple[int, ...] = ()
    """Elements of each tensor outside the layers beyond embedding, head and final norm."""
    adapters: int = 0
    """The rank of adapters in all layers, which alone train; 0 if everything trains. See :meth:`adapted`."""
    joined_attention: bool = False
    """Whether one matrix makes queries, keys and values."""
    matrices_at_end: tuple[tuple[int, int], ...] = ()
    """Rows and columns of the matrices among ``extras``."""
    composed_activation: bool = False
    """Whether models of transformers compute the activation function by several operations, as gelu_new of GPT-2."""
    query_key_norms: bool = False
    """Whether queries and keys of each head are normed, as in Qwen3."""
    is_plain_gpt: bool = True
    """Whether sizes say all of a GPT with biases and LayerNorm, or without and with RMSNorm, so that flags made of them
    build it. False for encoders, parallel residuals and other activation functions."""

    def __post_init__(self) -> None:
        for field in (
            "layers",
            "hidden_size",
            "attention_heads",
            "vocabulary_size",
            "sequence_length",
            "key_value_heads",
            "head_size",
            "feed_forward_size",
            "experts",
            "experts_per_token",
        ):
            count(field, getattr(self, field))
        if self.layers > MOST_LAYERS:
            raise ValueError(
                f"layers is {self.layers} (num_hidden_layers of a config.json); the planner takes {MOST_LAYERS} at most"
            )
        if self.attention_heads % self.key_value_heads:
            raise ValueError(
                f"key_value_heads is {self.key_value_heads}; it must divide the {self.attention_heads} attention_heads"
            )
        if 0 < self.position_embeddings < self.sequence_length:
            raise ValueError(
                f"sequence_length is {self.sequence_length}, but {self.name} has {self.position_embeddings} learned "
                "positions; use at most as many"
            )
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token is {self.experts_per_token}; there are only {self.experts} experts")
        if self.experts % count("expert_ranks", self.expert_ranks):
            raise ValueError(
                f"expert_ranks is {self.expert_ranks}; it must divide the {self.experts} experts of {self.name}"
            )
        if self.dense_layers and not (self.dense_layers < self.layers and self.dense_size):
            raise ValueError(
                f"dense_layers is {self.dense_layers}, and dense_size {self.dense_size}; use fewer than {self.layers} "
                "layers, and a size"
            )

    @property
    def value_size(self) -> int:
        """Values of a head."""
        return self.head_size if self.latent is None else self.latent.value_size

    @property
    def query_width(self) -> int:
        """Queries of all heads."""
        return self.attention_heads * self.head_size

    @property
    def key_value_width(self) -> int:
        """Keys and values of all heads that have their own."""
        return self.key_value_heads * (self.head_size + self.value_size)

    @property
    def matrices(self) -> int:
        """Matrices of a feed-forward part."""
        return 3 if self.gated else 2

    @property
    def attention_matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of the matrices of one layer's attention."""
        output = self.attention_heads * self.value_size, self.hidden_size
        if self.latent is None:
            return [(self.hidden_size, self.query_width + self.key_value_width), output]
        low, hidden = self.latent, self.hidden_size
        queries = [(hidden, low.query_rank), (low.query_rank, self.query_width)] if low.query_rank else []
        # The keys' part with positions comes from the hidden state, once for all heads.
        made = self.key_value_width - self.key_value_heads * low.rotary_size
        return [
            *(queries or [(hidden, self.query_width)]),
            (hidden, low.key_value_rank + low.rotary_size),
            (low.key_value_rank, made),
            output,
        ]

    @property
    def attention_layers(self) -> list[tuple[int, int]]:
        """The same as modules have them, which may have queries, keys and values each."""
        if self.joined_attention or self.latent is not None:
            return self.attention_matrices
        hidden, keys = self.hidden_size, self.key_value_width // 2
        return [(hidden, self.query_width), (hidden, keys), (hidden, keys), self.attention_matrices[1]]

    @property
    def linear_layers(self) -> list[tuple[int, int]]:
        """Rows and columns of the matrices of one layer without experts and latent attention, as its modules have
        them."""
        hidden, wide = self.hidden_size, self.feed_forward_size
        return [*self.attention_layers, *[(hidden, wide)] * (self.matrices - 1), (wide, hidden)]

    @property
    def own_experts(self) -> int:
        """The experts of a layer that a rank has."""
        return self.experts // self.expert_ranks


@dataclass(frozen=True)
class Model(Sizes):
    """A transformer: what follows from its sizes for kinds of layers and their parameters."""

    @classmethod
    def gpt(
        cls,
        name: str,
        layers: int,
        hidden_size: int,
        attention_heads: int,
        sequence_length: int,
        vocabulary_size: int,
        feed_forward_size: int | None = None,
    ) -> "Model":
        """Returns a GPT as in arXiv 2104.04473: learned positions, tied embeddings, feed-forward size 4h by default."""
        if attention_heads < 1 or hidden_size % attention_heads:
            raise ValueError(f"attention_heads is {attention_heads}; it must divide the hidden_size {hidden_size}")
        return cls(
            name=name,
            layers=layers,
            hidden_size=hidden_size,
            attention_heads=attention_heads,
            vocabulary_size=vocabulary_size,
            sequence_length=sequence_length,
            key_value_heads=attention_heads,
            head_size=hidden_size // attention_heads,
            feed_forward_size=feed_forward_size or 4 * hidden_size,
            position_embeddings=sequence_length,
            joined_attention=True,
            composed_activation=True,
        )

    def divided(self, expert_ranks: int) -> "Model":
        """Returns the model whose experts so many ranks divide. Layers then count what one of these has. Raises
        ValueError if they cannot be divided so."""
        return self if expert_ranks == self.expert_ranks else _divided(self, expert_ranks)

    def adapted(self, rank: int) -> "Model":
        """Returns the model with adapters of so many ranks, as ``target_modules="all-linear"`` of peft makes them: two
        matrices beside every matrix but embedding and head (LoRA, arXiv 2106.09685). All else is frozen.

        Raises ValueError for models with experts or latent attention, where peft adds others.
        """
        if self.experts > 1 or self.latent is not None:
            has = "latent attention" if self.experts == 1 else f"{self.experts} experts"
            raise ValueError(
                f"adapters is {rank}, but {self.name} has {has}, beside which peft adds adapters of other sizes; use "
                "a model without"
            )
        return replace(self, adapters=count("adapters", rank))

    @property
    def kinds(self) -> tuple[tuple[int, "Model"], ...]:
        """The kinds of layers in their order: how many there are, and a model of which all layers are like them."""
        return _kinds(self)

    def counts_between(self, start: int, end: int) -> tuple[int, ...]:
        """Returns how many layers of each kind are among those from ``start`` to ``end``."""
        if not self.dense_layers:
            return (end - start,)
        dense = max(0, min(end, self.dense_layers) - start)
        return dense, end - start - dense

    @property
    def tensors_in_layer(self) -> list[int]:
        """Elements of each tensor of one layer that trains, as models of transformers have them."""
        if self.adapters:
            return [self.adapters * size for matrix in self.linear_layers for size in matrix]
        attention, hidden, experts = self.attention_layers, self.hidden_size, self.own_experts
        # All experts have one tensor for gates and what they multiply, and one for what follows.
        parts = [self.matrices - 1, 1] if self.experts > 1 else [1] * self.matrices
        weights = [rows * columns for rows, columns in attention]
        weights += [experts * part * hidden * self.feed_forward_size for part in parts]
        weights += [hidden * self.shared_size] * self.matrices
        vectors = [hidden] * (4 if self.biases else 2)
        if self.biases:
            vectors += [columns for _, columns in attention]
            vectors += [experts * part * self.feed_forward_size for part in parts[:-1]] + [experts * hidden]
        extras = [*(experts * size for size in self.expert_extras), *self.layer_extras, self.router_parameters]
        return [size for size in weights + vectors + extras if size]

    def adapters_of(self, matrices: Iterable[tuple[int, int]]) -> int:
        """Returns the parameters of the adapters of ``matrices``."""
        return self.adapters * sum(rows + columns for rows, columns in matrices)

    @property
    def trained_in_layer(self) -> int:
        """Parameters of one layer that train."""
        return self.adapters_of(self.linear_layers) if self.adapters else self.layer_parameters

    @property
    def adapter_parameters(self) -> int:
        """Parameters of all adapters."""
        return self.layers * self.adapters_of(self.linear_layers) + self.adapters_of(self.matrices_at_end)

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention."""
        weights = sum(rows * columns for rows, columns in self.attention_matrices)
        biases = self.query_width + self.key_value_width + self.hidden_size
        return weights + (biases if self.biases else 0)

    @property
    def expert_parameters(self) -> int:
        """Weights of one feed-forward part, or of one expert."""
        biases = (self.matrices - 1) * self.feed_forward_size + self.hidden_size if self.biases else 0
        return self.matrices * self.hidden_size * self.feed_forward_size + biases + sum(self.expert_extras)

    @property
    def divided_parameters(self) -> int:
        """Weights of a layer that only some data-parallel ranks have, on one of them: its experts, if ranks divide
        them."""
        return self.own_experts * self.expert_parameters if self.expert_ranks > 1 else 0

    @property
    def shared_parameters(self) -> int:
        """Weights of the feed-forward part that every token visits beside its experts."""
        return self.matrices * self.hidden_size * self.shared_size

    @property
    def router_parameters(self) -> int:
        """Weights of what chooses among experts."""
        return self.hidden_size * self.experts if self.experts > 1 else 0

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer, norms included; of one with experts, if there are layers of two kinds."""
        parts = self.attention_parameters + self.own_experts * self.expert_parameters + self.shared_parameters
        return parts + self.router_parameters + 2 * self.norm_parameters + sum(self.layer_extras)

    @property
    def norm_parameters(self) -> int:
        return self.hidden_size * (2 if self.biases else 1)

    @property
    def embedding_parameters(self) -> int:
        return self.hidden_size * (self.vocabulary_size + self.position_embeddings)

    @property
    def head_parameters(self) -> int:
        """Weights of the head that are its own; none if it is tied."""
        return 0 if self.tied_embeddings else self.hidden_size * self.vocabulary_size

    @property
    def parameters(self) -> int:
        """All parameters, tied ones once, without adapters."""
        layers = sum(count * kind.layer_parameters for count, kind in self.kinds)
        return layers + self.embedding_parameters + self.norm_parameters + self.head_parameters + sum(self.extras)

    @property
    def active_parameters(self) -> int:
        """The parameters without the experts that a token does not visit."""
        idle = sum(
            count * (kind.experts - kind.experts_per_token) * kind.expert_parameters for count, kind in self.kinds
        )
        return self.parameters - idle


@lru_cache(maxsize=256)
def _divided(model: Model, expert_ranks: int) -> Model:
    if not model.divided_by and expert_ranks > 1:
        raise ValueError(f"expert_ranks is {expert_ranks}, but nothing divides the experts of {model.name}; use 1")
    return replace(model, expert_ranks=expert_ranks)


@lru_cache(maxsize=256)
def _kinds(model: Model) -> tuple[tuple[int, Model], ...]:
    if not model.dense_layers:
        return ((model.layers, model),)
    dense = replace(
        model,
        layers=model.dense_layers,
        feed_forward_size=model.dense_size,
        experts=1,
        experts_per_token=1,
        expert_extras=(),
        expert_ranks=1,
        shared_size=0,
        dense_layers=0,
    )
    rest = model.layers - model.dense_layers
    return ((model.dense_layers, dense), (rest, replace(model, layers=rest, dense_layers=0)))
