"""Finds a model: by name, from a config.json of transformers, from flags of Megatron-LM."""

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from pathlib import Path

from ds_lgamp.fields import read_json, read_text
from ds_lgamp.planner.model import MEGATRON, Model
from ds_lgamp.planner.transformers_config import model_of_config

_UNKNOWN = ("--moe-", "--multi-latent-attention", "--mtp-", "--hybrid-", "--mamba-", "--heterogeneous-", "--encoder-")
"""Flags that change sizes in a way the planner does not know. All others that are not read here do not change them."""
_KNOWN = (
    "--moe-router-topk",
    "--moe-aux-loss-coeff",
    "--moe-router-load-balancing-type",
    "--moe-token-dispatcher-type",
)
"""Exceptions from these."""
_BEYOND_SIZES = ("--squared-relu", "--rotary-base", "--rotary-percent", "--add-qkv-bias", "--qk-layernorm")
"""Flags that change the model, but not what a step costs, or not by much."""


def model_of_flags(name: str, text: str, sequence_length: int | None = None) -> Model:
    """Returns the sizes of the model that ``text`` describes, such as "--num-layers 24 --hidden-size 1024 ...".

    Raises ValueError if a flag that is needed is missing, or one that changes sizes is not understood.
    """
    flags = Flags(text)
    flags.refuse_unknown()
    hidden, heads = flags.count("--hidden-size"), flags.count("--num-attention-heads")
    gated = flags.has("--swiglu")
    # Megatron-LM's own default for SwiGLU: as many parameters as 4h without a gate, in multiples of 64.
    wide = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    rotary = flags.has("--use-rotary-position-embeddings") or flags.word("--position-embedding-type") in (
        "rope",
        "none",
    )
    length = flags.count("--seq-length", sequence_length)
    positions = flags.count("--max-position-embeddings", length)
    biases = not flags.has("--disable-bias-linear")
    rms = flags.word("--normalization") == "RMSNorm"
    if "--kv-channels" not in flags.values and hidden % heads:
        raise ValueError(f"--num-attention-heads is {heads}; it must divide the --hidden-size {hidden}")
    head_size = flags.count("--kv-channels", hidden // heads)
    grouped = flags.has("--group-query-attention")
    key_values = flags.count("--num-query-groups", 1) if grouped else heads
    extras = [head_size] * (2 if rms else 4) * flags.has("--qk-layernorm")
    if flags.has("--add-qkv-bias") and not biases:
        extras += [head_size * each for each in (heads, key_values, key_values)]
    # ``biases`` stands for linear layers and norms alike; the difference is an extra.
    norm_bias = () if rms == (not biases) else (-hidden if rms else hidden,)
    return Model(
        name=name,
        layers=flags.count("--num-layers"),
        hidden_size=hidden,
        attention_heads=heads,
        vocabulary_size=_padded_vocabulary(flags),
        sequence_length=length if sequence_length is None else sequence_length,
        key_value_heads=key_values,
        head_size=head_size,
        feed_forward_size=flags.count("--ffn-hidden-size", wide),
        gated=gated,
        experts=flags.count("--num-experts", 1),
        experts_per_token=flags.count("--moe-router-topk", 2) if "--num-experts" in flags.values else 1,
        divided_by=MEGATRON if "--num-experts" in flags.values else "",
        tied_embeddings=not flags.has("--untie-embeddings-and-output-weights"),
        position_embeddings=0 if rotary else positions,
        biases=biases,
        # As GPT-2 of transformers, which trains without tensor parallelism.
        joined_attention=not gated,
        composed_activation=not gated,
        query_key_norms=flags.has("--qk-layernorm"),
        is_plain_gpt=rms != biases and not any(map(flags.has, _BEYOND_SIZES)),
        layer_extras=(*extras, *norm_bias, *norm_bias),
        extras=norm_bias,
    )


def _padded_vocabulary(flags: "Flags") -> int:
    """Megatron-LM pads the vocabulary so that every tensor rank holds a multiple of 128 words."""
    multiple = flags.count("--make-vocab-size-divisible-by", 128) * flags.count("--tensor-model-parallel-size", 1)
    return ceil(flags.count("--vocab-size") / multiple) * multiple


class UnclosedQuote(ValueError):
    """Flags cannot be told apart; the message is a sentence without its subject."""

    def __init__(self) -> None:
        super().__init__("a quote among the flags is not closed; close it")


class Flags:
    """Flags and their values. Lines may end with a backslash. Raises :class:`UnclosedQuote`."""

    def __init__(self, text: str) -> None:
        self.values: dict[str, str | None] = {}
        flag = None
        try:
            words = shlex.split(text.replace("\\\n", " "), comments=True)
        except ValueError:
            raise UnclosedQuote from None
        for word in words:
            if word.startswith("--"):
                flag, equals, value = word.partition("=")
                self.values[flag] = value if equals else None
            elif flag is not None and self.values[flag] is None:
                self.values[flag] = word

    def has(self, flag: str) -> bool:
        return flag in self.values

    def word(self, flag: str) -> str | None:
        return self.values.get(flag)

    def count(self, flag: str, default: int | None = None) -> int:
        value = self.values.get(flag)
        if flag not in self.values:
            if default is None:
                raise ValueError(f"{flag} is missing; add it to the flags of the model")
            return default
        if value is None or not value.isdecimal() or int(value) < 1:
            raise ValueError(f"{flag} is {value!r}; use a whole number from 1")
        return int(value)

    def refuse_unknown(self) -> None:
        for flag in self.values:
            if flag.startswith(_UNKNOWN) and flag not in _KNOWN:
                raise ValueError(f"{flag} changes the model in a way that the planner does not know; remove it")


VOCABULARY = 51200
"""GPT-2's 50257 words, padded as Megatron-LM pads them."""


def _llama(name: str, layers: int, hidden: int, heads: int, wide: int, tied: bool = False) -> Model:
    """Llama 3.1, trained on sequences of 8192 tokens (arXiv 2407.21783, table 3), and the small ones of Llama 3.2."""
    return Model(
        name=name,
        layers=layers,
        hidden_size=hidden,
        attention_heads=heads,
        vocabulary_size=128256,
        sequence_length=8192,
        key_value_heads=8,
        head_size=hidden // heads,
        feed_forward_size=wide,
        gated=True,
        tied_embeddings=tied,
        biases=False,
    )


def _qwen(name: str, layers: int, wide: int) -> Model:
    """Qwen2.5 with 5120 hidden sizes (arXiv 2412.15115, table 1), whose queries, keys and values have biases."""
    llama = _llama(name, layers, 5120, 40, wide)
    return replace(llama, vocabulary_size=152064, layer_extras=(40 * 128, 8 * 128, 8 * 128))


_NAMED: dict[str, Callable[[str], Model]] = {
    "gpt2": lambda name: Model.gpt(name, 12, 768, 12, 1024, 50257),
    # arXiv 2005.14165, table 2.1
    "gpt3-175b": lambda name: Model.gpt(name, 96, 12288, 96, 2048, VOCABULARY),
    # arXiv 2201.11990, section 3.1
    "gpt-530b": lambda name: Model.gpt(name, 105, 20480, 128, 2048, VOCABULARY),
    # arXiv 2104.04473, table 1
    "megatron-1t": lambda name: Model.gpt(name, 128, 25600, 160, 2048, VOCABULARY),
    "llama-1b": lambda name: _llama(name, 16, 2048, 32, 8192, tied=True),
    "llama-3b": lambda name: _llama(name, 28, 3072, 24, 8192, tied=True),
    "llama-8b": lambda name: _llama(name, 32, 4096, 32, 14336),
    "llama-70b": lambda name: _llama(name, 80, 8192, 64, 28672),
    "qwen-14b": lambda name: _qwen(name, 48, 13824),
    "qwen-32b": lambda name: _qwen(name, 64, 27648),
}
NAMES = (*_NAMED, "x160")
"""The names that :func:`read_model` knows. Any number may follow the x."""


def x_family(size: int) -> Model:
    """Returns the model X_x: x layers, x heads of size x, sequences of 16x tokens (arXiv 2106.02679)."""
    return Model.gpt(f"x{size}", size, size**2, size, 16 * size, VOCABULARY)


def read_model(source: str, sequence_length: int | None = None) -> Model:
    """Returns the model that ``source`` names.

    Args:
        source: one of :data:`NAMES`, a path of a config.json, flags such as "--num-layers 24 --hidden-size 1024", or a
            path of a file with such flags.
        sequence_length: tokens per sequence in training; by default what the source says.

    Raises ValueError if there is no such model, or if a key is missing or not understood.
    """
    match = re.fullmatch(r"x([1-9]\d*)", source)
    if match or source in _NAMED:
        model = x_family(int(match[1])) if match else _NAMED[source](source)
        return model if sequence_length is None else replace(model, sequence_length=sequence_length)
    if source.lstrip().startswith("--"):
        return model_of_flags("flags", source, sequence_length)
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"model is '{source}'; use a config.json, flags of Megatron-LM or one of {', '.join(NAMES)}")
    if path.suffix == ".json":
        name = path.stem if path.stem != "config" else path.resolve().parent.name
        return model_of_config(name, read_json(source, "model"), sequence_length)
    try:
        return model_of_flags(path.stem, read_text(source, "model"), sequence_length)
    except UnclosedQuote as error:
        raise ValueError(f"model is '{source}', where {error}") from None
