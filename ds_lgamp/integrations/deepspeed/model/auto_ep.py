"""DeepSpeed's AutoEP, which replaces the layers with experts of a model by layers whose experts ranks divide: which
layers, what would be lost of them, and their state under the names of the model."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import validate_autoep_config, validate_autoep_post_detection
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer, ReplacementSourceMap
from deepspeed.module_inject.auto_ep_presets.base import MoELayerSpec
from deepspeed.module_inject.auto_ep_presets.registry import available_preset_names
from deepspeed.moe.fused_expert_layout import classify_fused_gate_up_layout
from deepspeed.runtime.engine import (
    _client_optimizer_needs_remap,
    _model_parameters_need_remap,
    _remap_client_optimizer_after_module_replacement,
    _remap_model_parameters_after_module_replacement,
)
from deepspeed.utils import groups as stock_groups
from torch import Tensor, nn

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.model.layer_moves import traits_of
from ds_lgamp.integrations.deepspeed.model.module import tensors_of
from ds_lgamp.integrations.split.parts import full_shape, model_of
from ds_lgamp.integrations.transformers.models import is_model


def replace_experts(model: nn.Module, arguments: dict[str, Any], pipeline_ranks: int) -> None:
    """Replaces the layers with experts of ``model`` by DeepSpeed's AutoEP, if the configuration asks for that. Needs
    the groups of experts. Collective over all ranks; raises ConfigError on all if the layers cannot be replaced.

    Args:
        arguments: what DeepSpeed's engine gets. Afterwards ``optimizer`` and ``model_parameters`` have the parameters
            of the new layers in the places of the old.
    """
    config, client, parameters = (arguments.get(name) for name in ("config_class", "optimizer", "model_parameters"))
    if not autoep_sizes(config):
        return
    finder = AutoEP(model, config.expert_parallel_config)  # type: ignore[union-attr]
    found, size = _layers_to_replace(finder, pipeline_ranks), finder.config.autoep_size
    _record_routers(model)
    is_eager, sources = _model_parameters_need_remap(parameters), ReplacementSourceMap()
    rank = dist.get_rank(stock_groups._get_expert_parallel_group(f"ep_size_{size}"))
    for each in found:
        router = model.get_submodule(f"{each.moe_module_name}.{each.router_name}")
        transposed = _is_transposed(model.get_submodule(f"{each.moe_module_name}.{each.experts_name}"), each)
        # Not its own way to the logits of routers, which transformers 5.23 does not offer any more.
        layer, more = finder._replace_moe_layer_without_retarget(
            each, size, rank, collect_sources=is_eager or _client_optimizer_needs_remap(client)
        )
        sources.update(more)
        layer.set_deepspeed_parallelism()
        setattr(layer, _ORIGINAL, (each, transposed))
        for hook in router._forward_hooks.values():
            if getattr(hook, "__name__", None) == _RECORDING:
                layer.router.gate.register_forward_hook(hook)
    _remap_client_optimizer_after_module_replacement(client, model, sources)
    if is_eager:
        _remap_model_parameters_after_module_replacement(parameters, model, sources)


def _layers_to_replace(finder: AutoEP, pipeline_ranks: int) -> list[MoELayerSpec]:
    """Returns the layers with experts that ``finder`` finds. Raises ConfigError if there are none, or if AutoEP cannot
    replace them."""
    asked, model, names = finder.config, type(finder.model).__name__, ", ".join(available_preset_names())
    if asked.preset_model not in (None, *available_preset_names()):
        raise ConfigError(
            f"expert_parallel.preset_model is {asked.preset_model!r}; use one of {names}, or leave it out"
        )
    try:
        validate_autoep_config(asked, dist.get_world_size(), pipeline_ranks, tp_size=1, sp_size=1)
        found = finder.ep_parser()
        for each in found:
            _refuse_layer(finder.model, each, asked.autoep_size)
        validate_autoep_post_detection(asked, found)
    except ConfigError:
        raise
    except ValueError as error:
        if "no MoE layers detected" not in str(error):
            raise ConfigError(f"DeepSpeed refuses expert_parallel for the {model}: {error}") from error
        found = []
    if not found:
        raise ConfigError(
            f"expert_parallel.enabled is True, but the {model} has no experts that DeepSpeed's presets {names} know; "
            "remove expert_parallel, or name the parts of its layers by expert_parallel.moe_layer_pattern, which "
            "begins with base_model.model inside a PeftModel, and the keys beside it"
        )
    return found


_ORIGINAL = "_ds_lgamp_original"
"""The attribute of a layer of AutoEP with what it replaces, and whether its matrices are transposed there."""
_RECORDING = "output_capturing_hook"
"""The hook by which transformers records what modules return."""


def autoep_sizes(config: Any) -> set[int]:
    """Returns among how many ranks the configuration, a DeepSpeedConfig, divides experts by AutoEP, if it does."""
    asked = config.expert_parallel_config
    return {asked.autoep_size} if asked is not None and asked.enabled else set()


def _record_routers(model: nn.Module) -> None:
    """Lets transformers put its hooks on the routers of ``model`` while they are the ones that it knows."""
    if is_model(model):
        with suppress(ImportError):
            from transformers.utils.output_capturing import maybe_install_capturing_hooks

            maybe_install_capturing_hooks(model_of(model))


def _refuse_layer(model: nn.Module, layer: MoELayerSpec, size: int) -> None:
    """Raises ConfigError if ``size`` ranks cannot divide the experts of a layer, or if AutoEP would leave something of
    it behind, such as biases and hooks."""
    if layer.num_experts % size:
        raise ConfigError(
            f"expert_parallel.autoep_size is {size}, which does not divide the {layer.num_experts} experts of "
            f"{layer.moe_module_name}; use a divisor of {layer.num_experts} and of the ranks"
        )
    if layer.expert_storage != "fused_3d":
        raise ConfigError(
            f"expert_parallel.enabled is True, but {layer.moe_module_name}.{layer.experts_name} has a module for every "
            "expert, as releases of transformers before 5 have; use a newer one, or remove expert_parallel"
        )
    if (lost := next(_lost(model.get_submodule(layer.moe_module_name), layer), None)) is not None:
        raise ConfigError(
            f"expert_parallel.enabled is True, but DeepSpeed would drop {lost} in {layer.moe_module_name} of the "
            f"{type(model).__name__}; do without, register hooks after deepspeed.initialize, or remove "
            "expert_parallel"
        )


def _lost(part: nn.Module, layer: MoELayerSpec) -> Iterator[str]:
    """Yields what of a layer with experts, ``part``, AutoEP would leave behind."""
    biases = ("bias",) if layer.gate_bias else ()
    known = {f"{layer.router_name}.{name}" for name in ("weight", *biases, *layer.unsupported_router_bias_names)}
    matrices = (layer.expert_w1_name, layer.expert_w2_name, layer.expert_w3_name)
    known |= {f"{layer.experts_name}.{name}" for name in matrices}
    kept = tuple(name for name in (layer.shared_experts_name, layer.shared_experts_gate_name) if name)
    for name, _ in tensors_of(part):
        if name not in known and not name.endswith("e_score_correction_bias") and name.split(".")[0] not in kept:
            yield f"the parameter or buffer {name}"
    for name, traits in traits_of({"": part}).items():
        hooks = part.get_submodule(name)._forward_hooks.values()
        recording = sum(getattr(hook, "__name__", None) == _RECORDING for hook in hooks)
        if traits.hooks > recording and name.split(".")[0] not in kept:
            yield f"hooks of {name or 'all of it'}, or a forward of its own,"
    if noise := getattr(part, "jitter_noise", 0):
        yield f"the router_jitter_noise {noise}"


def _is_transposed(experts: nn.Module, layer: MoELayerSpec) -> bool:
    """Whether AutoEP transposes the matrices of ``experts``, as it does if it splits one of two along its columns."""
    names = (layer.expert_w1_name, layer.expert_w2_name)
    first, second = (getattr(experts, name) for name in names)
    layout = classify_fused_gate_up_layout(full_shape(first), full_shape(second))
    return layer.expert_w3_name is None and layout is not None and layout.needs_transpose


def is_replaced(model: nn.Module) -> bool:
    """Whether layers of ``model`` are AutoEP's."""
    return any(isinstance(module, AutoEPMoELayer) for module in model.modules())


def under_original_names(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Returns the whole ``state`` of ``model`` as it would be with the layers that AutoEP has replaced."""
    for path, layer in model.named_modules():
        if (original := getattr(layer, _ORIGINAL, None)) is not None:
            start = f"{path}."
            inside = {name.removeprefix(start): state.pop(name) for name in [*state] if name.startswith(start)}
            state |= {f"{path}.{name}": value for name, value in _original_state(layer, original, inside)}
    return state


def _original_state(
    layer: nn.Module, replaced: tuple[MoELayerSpec, bool], state: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the ``state`` of a layer of AutoEP by the names, and in the shapes, of the layer that it has replaced."""
    original, transposed = replaced
    routers = tuple(f"{name}." for name, part in layer._modules.items() if part is layer.router)
    experts = {name: state.pop(f"experts.{name}") for name in ("w1", "w2", "w3") if f"experts.{name}" in state}
    for name, value in state.items():
        if name.startswith("router.gate."):
            yield f"{original.router_name}.{name.removeprefix('router.gate.')}", value
        elif name.startswith("router."):
            yield f"{original.e_score_correction_bias_path}.{name.removeprefix('router.')}".lstrip("."), value
        elif not name.startswith(routers):
            yield name, value
    if original.expert_w3_name is None and "w3" in experts:
        experts["w1"] = torch.cat([experts["w1"], experts.pop("w3")], dim=1)
    own = {"w1": original.expert_w1_name, "w2": original.expert_w2_name, "w3": original.expert_w3_name}
    for name, value in experts.items():
        made = value.transpose(1, 2).contiguous() if transposed else value
        yield f"{original.experts_name}.{own[name]}", made
