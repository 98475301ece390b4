"""Finds a model: by name, from a config.json of transformers, from flags of Megatron-LM."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ds_lgamp.planner.fields import read_json, read_text
from ds_lgamp.planner.megatron_flags import UnclosedQuote, model_of_flags
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.transformers_config import model_of_config

VOCABULARY = 51200
"""GPT-2's 50257 words, padded as Megatron-LM pads them."""


def _llama(name: str, layers: int, hidden: int, heads: int, wide: int) -> Model:
    """Llama 3.1, trained on sequences of 8192 tokens (arXiv 2407.21783, table 3)."""
    return Model(
        name=name,
        layers=layers,
        hidden_size=hidden,
        attention_heads=heads,
        vocabulary_size=128256,
        sequence_length=8192,
        key_value_heads=8,
        head_size=128,
        feed_forward_size=wide,
        gated=True,
        tied_embeddings=False,
        biases=False,
    )


_NAMED: dict[str, Callable[[str], Model]] = {
    "gpt2": lambda name: Model.gpt(name, 12, 768, 12, 1024, 50257),
    # arXiv 2005.14165, table 2.1
    "gpt3-175b": lambda name: Model.gpt(name, 96, 12288, 96, 2048, VOCABULARY),
    # arXiv 2201.11990, section 3.1
    "gpt-530b": lambda name: Model.gpt(name, 105, 20480, 128, 2048, VOCABULARY),
    # arXiv 2104.04473, table 1
    "megatron-1t": lambda name: Model.gpt(name, 128, 25600, 160, 2048, VOCABULARY),
    "llama-8b": lambda name: _llama(name, 32, 4096, 32, 14336),
    "llama-70b": lambda name: _llama(name, 80, 8192, 64, 28672),
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
