"""Refuses ranks that differ, before anything is built: in their configuration, their process or their model."""

from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
from torch import nn

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.deepspeed.model.module import built_layers, global_names, layer_types, shown_name
from ds_lgamp.integrations.handshake import code_of, process_terms
from ds_lgamp.partition.agreement import Term, complaint_about_terms, difference, digest, everyone, raise_everywhere

_OF_ONE_RANK = ("tensorboard", "wandb", "csv_monitor", "comet")
"""Sections that may differ, because only one rank heeds them."""
_SAME_FILE, _SAME_CODE = "give every rank the same configuration", "start every rank from the same code"
_SHOWN = 60


def refuse_differing_ranks(config: dict[str, Any]) -> None:
    """Raises ConfigError if two ranks differ in the configuration, the versions of packages or the environment, and a
    rank has a block. Collective over all ranks."""
    own = {
        name: Term(_short(value), _SAME_FILE)
        for key, given in config.items()
        if key not in _OF_ONE_RANK
        for name, value in _leaves(str(key), given)
    }
    own |= process_terms()
    ranks = everyone((config.get(BLOCK) is not None, digest(own)))
    if len({found for _, found in ranks}) > 1 and any(has_block for has_block, _ in ranks):
        raise ConfigError(difference(everyone(own)))


def refuse_differing_models(module: PipelineModule) -> None:
    """Raises ConfigError if two ranks specify other layers, or if data-parallel ranks have built others. Collective
    over all ranks."""
    names = layer_types(module)
    specified = {"the number of layers": Term(str(len(names)), _SAME_CODE)}
    for number, (name, spec) in enumerate(zip(names, module._layer_specs)):
        specified[f"layer {number}"] = Term(name + _code(spec), _SAME_CODE)
    raise_everywhere(complaint_about_terms(specified), ConfigError)
    built = {
        f"layer {prefix}": Term(type(layer).__name__ + _code_of_modules(layer), _SAME_CODE)
        for prefix, layer in built_layers(module).items()
    }
    for name, tensor in global_names(module):
        built[f"tensor {shown_name(module, name)}"] = Term(f"{list(tensor.shape)} {tensor.dtype}", _SAME_CODE)
    raise_everywhere(complaint_about_terms(built, module._grid.get_data_parallel_group()), ConfigError)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the dotted names under ``name`` and their values. An empty section is a value."""
    if not isinstance(value, dict) or not value:
        yield name, value
        return
    for key, member in value.items():
        yield from _leaves(f"{name}.{key}", member)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({digest({'': Term(text, '')}):x})"


def _code(spec: Any) -> str:
    made_of = spec.typename if isinstance(spec, LayerSpec) else type(spec) if isinstance(spec, nn.Module) else spec
    code = code_of(made_of)
    return f" with code {code}" if code else ""


def _code_of_modules(layer: nn.Module) -> str:
    kinds = {type(module) for module in layer.modules()}
    codes = sorted(filter(None, map(code_of, kinds)))
    return f" with code {digest({'': Term(' '.join(codes), '')}):x}" if codes else ""
