"""Reads sizes from a config.json of transformers. Counts parameters as transformers' own classes have them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ds_lgamp.fields import count
from ds_lgamp.planner.model import AUTOEP, LatentAttention, Model

LONGEST_DEFAULT = 8192
"""A context may be far longer than the sequences of training. Without a given length, training takes at most this."""


class _Config:
    """A config.json whose missing and odd keys are refused by name."""

    def __init__(self, name: str, keys: Mapping[str, Any], sequence_length: int | None) -> None:
        self.name, self._keys, self._sequence_length = name, keys, sequence_length

    def count(self, key: str, default: int | None = None) -> int:
        """Returns a whole number. Without ``default``, the key must be there. A null counts as missing."""
        value = self._keys.get(key)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{key} is missing in the config of {self.name}; add it, as transformers writes it")
        return count(key, value)

    def size(self, key: str, default: int) -> int:
        """Returns a whole number, which may be 0. A null counts as 0."""
        return 0 if self._keys.get(key, default) in (None, 0) else self.count(key, default)

    def first(self, *keys: str) -> int:
        """Returns the whole number of the first key that is there."""
        return self.count(next((key for key in keys if key in self._keys), keys[0]))

    def experts(self, *keys: str) -> int:
        """Returns the number of experts, at the first key that is there. Refuses 1: a single one has a router, too."""
        found = self.first(*keys)
        if found == 1:
            raise ValueError(f"{keys[0]} is 1, of which the planner does not count the router; use 2 or more")
        return found

    def flag(self, key: str, default: bool) -> bool:
        value = self._keys.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{key} is {value!r}; use true or false")
        return value

    def word(self, key: str, default: str) -> str:
        return str(self._keys.get(key, default))

    def only(self, key: str, *allowed: object) -> None:
        """Refuses a value whose effect on sizes is not understood."""
        value = self._keys.get(key, allowed[0])
        if value not in allowed:
            raise ValueError(f"{key} is {value!r}, which the planner does not understand; it knows {allowed[0]!r}")

    def layer_types(self, layers: int) -> list[str]:
        """Returns the kind of attention of every layer; if the config does not say, windows and whole sequences in
        turn."""
        kinds, known = self._keys.get("layer_types"), ["sliding_attention", "full_attention"]
        if kinds is None:
            return [known[layer % 2] for layer in range(layers)]
        if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in known for kind in kinds):
            raise ValueError(f"layer_types is {kinds!r}; name {' or '.join(known)} for each of {layers} layers")
        return kinds

    def sequence_length(self, longest: int) -> int:
        if self._sequence_length is None:
            return min(longest, LONGEST_DEFAULT)
        return count("sequence_length", self._sequence_length)

    def refuse_experts(self) -> None:
        for key, value in self._keys.items():
            if "expert" in key and value:
                raise ValueError(f"{key} is {value!r}; a {self._keys['model_type']} has no experts that are understood")


def model_of_config(name: str, config: Mapping[str, Any], sequence_length: int | None = None) -> Model:
    """Returns the sizes of the model that ``config`` describes.

    Raises ValueError if its architecture is unknown, or a key that matters is missing or has a value that is not
    understood.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        raise ValueError(f"model_type is {kind!r}; the planner reads {', '.join(sorted(_READERS))}")
    read = _Config(name, config, sequence_length)
    read.only("is_encoder_decoder", False)
    read.only("add_cross_attention", False)
    return _READERS[kind](read)


class _Keys(NamedTuple):
    """What a config calls the sizes of a model of the GPT-2 kind."""

    layers: str = "num_hidden_layers"
    hidden: str = "hidden_size"
    heads: str = "num_attention_heads"
    longest: str = "max_position_embeddings"
    """Tokens of the longest sequence."""


def _gpt2(config: _Config) -> Model:
    keys = _Keys("n_layer", "n_embd", "n_head", "n_positions")
    activation = config.word("activation_function", "gelu_new")
    wide = config.count("n_inner", 4 * config.count(keys.hidden))
    model = _with_biases(config, keys, wide=wide, activation=activation)
    return replace(model, joined_attention=True, is_plain_gpt=activation.startswith("gelu"))


def _opt(config: _Config) -> Model:
    config.only("word_embed_proj_dim", config.count("hidden_size"))
    config.only("_remove_final_layer_norm", False)
    config.only("do_layer_norm_before", True)
    config.only("enable_bias", True)
    activation = config.word("activation_function", "relu")
    # transformers leaves two rows for padding.
    return _with_biases(config, wide=config.count("ffn_dim"), more_rows=2, activation=activation)


def _gpt_neox(config: _Config) -> Model:
    config.only("attention_bias", True)
    wide, activation = config.count("intermediate_size"), config.word("hidden_act", "gelu")
    model = _with_biases(config, wide=wide, more_rows=None, tied=False, activation=activation)
    return replace(model, joined_attention=True)


def _bert(config: _Config) -> Model:
    wide, activation = config.count("intermediate_size"), config.word("hidden_act", "gelu")
    model = _with_biases(config, wide=wide, more_rows=config.count("type_vocab_size"), activation=activation)
    # The head has a matrix, its bias and a norm in front, and a bias for every word. The norm that the sizes have
    # after the layers is the one after the embedding.
    hidden = model.hidden_size
    extras = hidden * hidden, *[hidden] * 3, model.vocabulary_size
    return replace(model, extras=extras, matrices_at_end=((hidden, hidden),))


_USUAL = _Keys()


def _with_biases(
    config: _Config,
    keys: _Keys = _USUAL,
    *,
    wide: int,
    activation: str,
    more_rows: int | None = 0,
    tied: bool = True,
) -> Model:
    """The GPT-2 kind: biases, LayerNorm, two matrices in the feed-forward part.

    Args:
        wide: the size of the feed-forward part.
        more_rows: rows of learned positions and token types beyond the longest sequence; None for rotary positions.
        tied: whether embeddings are tied where the config does not say.
    """
    hidden, heads, longest = config.count(keys.hidden), config.count(keys.heads), config.count(keys.longest)
    if hidden % heads:
        raise ValueError(f"the number of attention heads is {heads}; it must divide the hidden size {hidden}")
    return Model(
        name=config.name,
        layers=config.count(keys.layers),
        hidden_size=hidden,
        attention_heads=heads,
        vocabulary_size=config.count("vocab_size"),
        sequence_length=config.sequence_length(longest),
        key_value_heads=heads,
        head_size=hidden // heads,
        feed_forward_size=wide,
        position_embeddings=0 if more_rows is None else longest + more_rows,
        tied_embeddings=config.flag("tie_word_embeddings", tied),
        composed_activation=activation in _COMPOSED,
        is_plain_gpt=False,
    )


_COMPOSED = ("gelu_new", "gelu_fast", "quick_gelu", "gelu_10", "mish")
"""Activation functions that transformers computes by several operations, each of which keeps a tensor."""


class _Attention(NamedTuple):
    """What attention of the Llama kind has beyond its matrices."""

    head_norms: bool = False
    """Whether queries and keys have norms of the size of a head."""
    bias: bool = False
    """Whether queries, keys and values have biases."""
    bias_of_output: bool = True
    """Whether the output has a bias where they have."""


_PLAIN = _Attention()


def _llama(config: _Config) -> Model:
    config.refuse_experts()
    return _without_biases(config, attention=_Attention(bias=config.flag("attention_bias", False)))


def _mistral(config: _Config) -> Model:
    config.refuse_experts()
    return _without_biases(config)


def _mixtral(config: _Config) -> Model:
    experts = config.experts("num_local_experts")
    model = _without_biases(config, experts=experts, experts_per_token=config.count("num_experts_per_tok"))
    return replace(model, divided_by=AUTOEP)


def _qwen2(config: _Config) -> Model:
    config.refuse_experts()
    return _without_biases(config, attention=_Attention(bias=True, bias_of_output=False))


def _qwen3(config: _Config) -> Model:
    config.refuse_experts()
    attention = _Attention(head_norms=True, bias=config.flag("attention_bias", False))
    return _without_biases(config, attention=attention)


def _qwen3_moe(config: _Config) -> Model:
    config.only("mlp_only_layers", [], None)
    config.only("decoder_sparse_step", 1)
    model = _without_biases(
        config,
        wide="moe_intermediate_size",
        attention=_Attention(head_norms=True, bias=config.flag("attention_bias", False)),
        experts=config.experts("num_experts", "num_local_experts"),
        experts_per_token=config.count("num_experts_per_tok"),
    )
    return replace(model, divided_by=AUTOEP)


def _gpt_oss(config: _Config) -> Model:
    config.count("head_dim")
    experts, biases = config.experts("num_local_experts", "num_experts"), config.flag("attention_bias", True)
    model = _without_biases(
        config,
        attention=_Attention(bias=biases),
        experts=experts,
        experts_per_token=config.count("num_experts_per_tok", 4),
    )
    sinks, of_router = model.attention_heads, experts
    return replace(
        model,
        layer_extras=(*model.layer_extras, sinks, of_router),
        expert_extras=(2 * model.feed_forward_size, model.hidden_size),
        rotary_size=model.head_size // 2,
        attention_masks=len(set(config.layer_types(model.layers))),
        in_single=("norms",),
        composed_activation=True,
    )


def _deepseek_v3(config: _Config) -> Model:
    heads, dense = config.count("num_attention_heads"), config.size("first_k_dense_replace", 3)
    config.only("num_key_value_heads", heads, None)
    plain, rotary = config.count("qk_nope_head_dim", 128), config.count("qk_rope_head_dim", 64)
    latent = LatentAttention(
        config.size("q_lora_rank", 1536), config.count("kv_lora_rank", 512), rotary, config.count("v_head_dim", 128)
    )
    model = _without_biases(config)
    extras = [latent.query_rank, latent.key_value_rank]
    if config.flag("attention_bias", False):
        extras += [latent.query_rank, latent.key_value_rank + rotary, model.hidden_size]
    model = replace(
        model,
        head_size=plain + rotary,
        key_value_heads=heads,
        latent=latent,
        rotary_size=rotary,
        layer_extras=tuple(size for size in extras if size),
    )
    if dense >= model.layers:
        return model
    wide = config.count("moe_intermediate_size")
    return replace(
        model,
        dense_layers=dense,
        dense_size=model.feed_forward_size if dense else 0,
        feed_forward_size=wide,
        experts=config.experts("n_routed_experts"),
        experts_per_token=config.count("num_experts_per_tok", 8),
        shared_size=wide * config.size("n_shared_experts", 1),
        in_single=("router",),
        divided_by=AUTOEP,
    )


def _gemma(config: _Config) -> Model:
    config.only("attention_bias", False)
    return _without_biases(config, tied=True)


def _gemma2(config: _Config) -> Model:
    config.only("attention_bias", False)
    # Both keep all scores, or copies of all logits, in memory that the planner does not count.
    config.only("attn_logit_softcapping", None)
    config.only("final_logit_softcapping", None)
    return _without_biases(config, tied=True, norms=4)


def _gemma3(config: _Config) -> Model:
    config.only("attention_bias", False)
    return _without_biases(config, tied=True, norms=4, attention=_Attention(head_norms=True))


def _without_biases(
    config: _Config,
    *,
    wide: str = "intermediate_size",
    tied: bool = False,
    norms: int = 2,
    attention: _Attention = _PLAIN,
    experts: int = 1,
    experts_per_token: int = 1,
) -> Model:
    """The Llama kind: RMSNorm, rotary positions, three matrices in the feed-forward part.

    Args:
        wide: the key of the feed-forward size.
        tied: whether embeddings are tied where the config does not say.
        norms: norms of a layer.
    """
    config.only("mlp_bias", False)
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    key_values = config.count("num_key_value_heads", heads)
    head_size = config.count("head_dim", max(1, hidden // heads))
    extras = [hidden] * (norms - 2) + [head_size] * (2 * attention.head_norms)
    if attention.bias:
        extras += [head_size * each for each in (heads, key_values, key_values)] + [hidden] * attention.bias_of_output
    return Model(
        name=config.name,
        layers=config.count("num_hidden_layers"),
        hidden_size=hidden,
        attention_heads=heads,
        vocabulary_size=config.count("vocab_size"),
        sequence_length=config.sequence_length(config.count("max_position_embeddings")),
        key_value_heads=key_values,
        head_size=head_size,
        feed_forward_size=config.count(wide),
        gated=True,
        experts=experts,
        experts_per_token=experts_per_token,
        tied_embeddings=config.flag("tie_word_embeddings", tied),
        biases=False,
        layer_extras=tuple(extras),
        query_key_norms=attention.head_norms,
    )


_READERS: dict[str, Callable[[_Config], Model]] = {
    "bert": _bert,
    "deepseek_v3": _deepseek_v3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "opt": _opt,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
"""The reader of each ``model_type``."""
