"""What costs depend on in a transformer: its sizes."""

from dataclasses import dataclass

from ds_lgamp.planner.fields import count

MOST_LAYERS = 500
"""Each layer may be a chunk, so the time of a search grows with their square: it takes a minute for so many."""


@dataclass(frozen=True)
class Model:
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
    tied_embeddings: bool = True
    """Whether the head uses the weights of the embedding."""
    position_embeddings: int = 0
    """Learned positions and token types; 0 for rotary and other tables without parameters."""
    biases: bool = True
    """Whether linear layers and norms have biases."""
    layer_extras: int = 0
    """Parameters of a layer beyond its matrices, all biases or none, and two norms: norms of queries, biases of the
    attention alone. They take memory, but no time worth counting."""
    extras: int = 0
    """Parameters outside the layers beyond embedding, head and final norm."""
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
            composed_activation=True,
        )

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention."""
        projected = self.head_size * (2 * self.attention_heads + 2 * self.key_value_heads)
        biases = self.head_size * (self.attention_heads + 2 * self.key_value_heads) + self.hidden_size
        return self.hidden_size * projected + (biases if self.biases else 0)

    @property
    def expert_parameters(self) -> int:
        """Weights of one feed-forward part."""
        matrices = 3 if self.gated else 2
        biases = (matrices - 1) * self.feed_forward_size + self.hidden_size
        return matrices * self.hidden_size * self.feed_forward_size + (biases if self.biases else 0)

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer, norms included."""
        router = self.hidden_size * self.experts if self.experts > 1 else 0
        parts = self.attention_parameters + self.experts * self.expert_parameters
        return parts + router + 2 * self.norm_parameters + self.layer_extras

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
        """All parameters, tied ones once."""
        layers = self.layers * self.layer_parameters
        return layers + self.embedding_parameters + self.norm_parameters + self.head_parameters + self.extras

    def layer_flops(self, tokens: int) -> float:
        """Returns the floating-point operations of one layer's forward for ``tokens`` tokens in whole sequences."""
        active = self.attention_parameters + self.experts_per_token * self.expert_parameters
        scores = 4.0 * self.attention_heads * self.head_size * self.sequence_length
        return tokens * (2.0 * active + scores)

    def head_flops(self, tokens: int) -> float:
        """Returns the floating-point operations of the head's forward."""
        return 2.0 * tokens * self.hidden_size * self.vocabulary_size

    def forward_flops(self, tokens: int) -> float:
        """Returns the floating-point operations of a forward. Counts attention over whole sequences, as MFU usually
        does (arXiv 2104.04473), though a causal kernel skips half."""
        return self.layers * self.layer_flops(tokens) + self.head_flops(tokens)
