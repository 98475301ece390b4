"""Renames the weights of a pipeline to those of Megatron-core's GPTModel, and back. Values stay equal to the bit.

A pipeline's names are those of its ``state_dict()``, of its checkpoints, and of the safetensors files made from them:
the number of the layer, or ``tied_modules`` and the key, then the name inside the layer. GPTModel's names are those of
its ``state_dict()``. With Transformer Engine, norms are parts of the linear layers that follow them, but the one ahead
of experts is not. Its extra states, the scales of 8-bit numbers, are left out. Of experts, all are there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.megatron.layers.gpt_layers import TIED_KEY, TIED_WEIGHT
from ds_lgamp.integrations.megatron.layers.transformer_block import TransformerImpl

T = TypeVar("T")

_TIED = f"tied_modules.{TIED_KEY}.{TIED_WEIGHT}"
_OUTPUT = "output_layer.weight"
_PIPELINE_LAYER, _MODEL_LAYER = re.compile(r"(\d+)\.layer\.(.+)"), re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_FUSED = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
"""The names of norms in layers of plain parts, each with its name in layers of Transformer Engine."""
_IN_EVERY_LAYER = {
    *("input_layernorm.weight", "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"),
    "pre_mlp_layernorm.weight",
}
_DENSE = {"mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}
_DENSE_BIASES = {name.replace("weight", "bias") for name in _DENSE}
_IN_SOME_MODELS = (
    {name.replace("weight", "bias") for name in _IN_EVERY_LAYER}
    | _DENSE_BIASES
    | {f"self_attention.{norm}_layernorm.{kind}" for norm in "qk" for kind in ("weight", "bias")}
)
_ROUTER = "mlp.router.weight"
_BESIDE_EXPERTS = {
    "mlp.router.bias",
    *(f"mlp.shared_experts.{name}" for name in ("linear_fc1.weight", "linear_fc2.weight", "gate_weight")),
}
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")


def to_gpt_model(weights: Mapping[str, T], transformer_impl: TransformerImpl = "local") -> dict[str, T]:
    """Returns the ``weights`` of a pipeline by their names in a GPTModel of ``transformer_impl``.

    Raises ConfigError if weights are missing or left over.
    """
    given = _plain(weights)
    return _renamed(given, _names(given, _PIPELINE_LAYER, tied=_TIED in given), transformer_impl)


def from_gpt_model(state: Mapping[str, T], transformer_impl: TransformerImpl = "local") -> dict[str, T]:
    """Returns the weights of a GPTModel's ``state`` by their names in a pipeline of ``transformer_impl``.

    Raises ConfigError if weights are missing or left over.
    """
    given = _plain(state)
    names = _names(given, _MODEL_LAYER, tied=_OUTPUT not in given)
    return _renamed(given, {model: pipeline for pipeline, model in names.items()}, transformer_impl)


def _names(given: Iterable[str], layer_name: re.Pattern[str], tied: bool) -> dict[str, str]:
    """Returns the name of every weight in a pipeline, with its name in the GPTModel, for the layers and kinds in
    ``given``."""
    found: dict[int, set[str]] = {}
    for match in filter(None, map(layer_name.fullmatch, given)):
        found.setdefault(int(match[1]), set()).add(match[2])
    parts = [_parts(found[layer], set().union(*found.values())) for layer in sorted(found)]
    parts, layers = parts or [_IN_EVERY_LAYER | _DENSE], max(1, len(found))
    names = {_TIED if tied else f"0.{TIED_WEIGHT}": "embedding.word_embeddings.weight"}
    optional = {
        "1.position_embeddings.weight": "embedding.position_embeddings.weight",
        f"{layers + 2}.norm.bias": "decoder.final_layernorm.bias",
    }
    names |= {pipeline: model for pipeline, model in optional.items() if not {pipeline, model}.isdisjoint(given)}
    for layer in range(layers):
        names |= {f"{layer + 2}.layer.{part}": f"decoder.layers.{layer}.{part}" for part in sorted(parts[layer])}
    names[f"{layers + 2}.norm.weight"] = "decoder.final_layernorm.weight"
    if not tied:
        names[f"{layers + 3}.{_OUTPUT}"] = _OUTPUT
    return names


def _parts(own: set[str], every: set[str]) -> set[str]:
    """Returns the names that a layer must have, if it has those in ``own`` and all layers together have ``every``."""
    sometimes = every & _IN_SOME_MODELS
    if _ROUTER not in own:
        return _IN_EVERY_LAYER | _DENSE | sometimes
    experts = [match for match in map(_EXPERT.fullmatch, every) if match]
    kinds = {match[2] for match in experts} or {"linear_fc1.weight"}
    numbers = range(1 + max((int(match[1]) for match in experts), default=0))
    names = {f"mlp.experts.local_experts.{number}.{kind}" for number in numbers for kind in kinds}
    return _IN_EVERY_LAYER | {_ROUTER} | names | (sometimes - _DENSE_BIASES) | (every & _BESIDE_EXPERTS)


def _renamed(given: Mapping[str, T], names: Mapping[str, str], transformer_impl: TransformerImpl) -> dict[str, T]:
    missing, left_over = sorted(names.keys() - given.keys()), sorted(given.keys() - names.keys())
    if missing or left_over:
        found = f"lack {missing[0]}" if missing else f"have {left_over[0]} left over"
        raise ConfigError(f"the weights {found}; take all weights of one GPT model, and nothing else")
    if transformer_impl != "transformer_engine":
        return {names[name]: weight for name, weight in given.items()}
    with_experts = {name.removesuffix(_ROUTER) for name in names.values() if name.endswith(_ROUTER)}
    return {_fused(names[name], with_experts): weight for name, weight in given.items()}


def _plain(weights: Mapping[str, T]) -> dict[str, T]:
    return {_unfused(name): weight for name, weight in weights.items() if not name.endswith("._extra_state")}


def _fused(name: str, with_experts: Collection[str]) -> str:
    for plain, fused in _FUSED.items():
        layer, is_norm, _ = name.partition(plain)
        if is_norm and not (".mlp." in fused and f"{layer}." in with_experts):
            name = name.replace(plain, fused)
    return name


def _unfused(name: str) -> str:
    for plain, fused in _FUSED.items():
        name = name.replace(fused, plain)
    return name
