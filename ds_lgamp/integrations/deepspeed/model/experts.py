"""Experts that data-parallel ranks divide among each other, of ``deepspeed.moe`` or by DeepSpeed's AutoEP: their
groups, their names and places in checkpoints, and what does not know them yet."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import (
    AUTOEP_PARAM_EP_RANK,
    AUTOEP_PARAM_LOCAL_EXPERTS,
    AUTOEP_PARAM_LOGICAL_SHAPE,
    DS_AUTOEP_UC_META,
)
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import validate_autoep_config, validate_autoep_post_detection
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer, ReplacementSourceMap
from deepspeed.module_inject.auto_ep_presets.base import MoELayerSpec
from deepspeed.module_inject.auto_ep_presets.registry import available_preset_names
from deepspeed.moe.fused_expert_layout import classify_fused_gate_up_layout
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.runtime.engine import (
    _client_optimizer_needs_remap,
    _model_parameters_need_remap,
    _remap_client_optimizer_after_module_replacement,
    _remap_model_parameters_after_module_replacement,
)
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.utils import groups as stock_groups
from torch import Tensor, nn

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.cost.traffic import ExpertLayer
from ds_lgamp.integrations.deepspeed.model.layer_moves import traits_of
from ds_lgamp.integrations.deepspeed.model.module import built_layers, global_names, tensors_of
from ds_lgamp.integrations.split.parts import model_of
from ds_lgamp.integrations.transformers.models import is_model
from ds_lgamp.partition.agreement import everyone, raise_everywhere
from ds_lgamp.schedule.spec import ProgramSpec

DividedLayer: TypeAlias = MoE | AutoEPMoELayer
"""A layer with experts, which ranks divide among each other."""


def divided(model: nn.Module) -> list[DividedLayer]:
    """Returns the layers of ``model`` whose experts ranks divide among each other."""
    return [module for module in model.modules() if isinstance(module, DividedLayer) and module.ep_size > 1]


def exchange_of(layer: DividedLayer, element: int) -> ExpertLayer:
    """Returns what the all-to-alls of a layer with divided experts carry, if all experts get as many tokens.

    Args:
        element: bytes of an element of hidden states.
    """
    if isinstance(layer, AutoEPMoELayer):
        token = layer.top_k * layer.hidden_size * element
        return ExpertLayer(layer.ep_size, token, layer.num_experts * torch.int32.itemsize)
    gate = layer.deepspeed_moe.gate
    # An expert has room for so many tokens, and all of it travels.
    copies = gate.k * gate.capacity_factor if gate.drop_tokens else gate.k
    return ExpertLayer(layer.ep_size, copies * gate.wg.in_features * element)


def place_among_experts(tensor: Tensor) -> tuple[int, int]:
    """Returns which of how many equal slices of a parameter ``tensor`` is. AutoEP slices along the first dimension, by
    experts; the experts of ``deepspeed.moe`` are parameters each."""
    if (meta := getattr(tensor, DS_AUTOEP_UC_META, None)) is None:
        return 0, 1
    return meta[AUTOEP_PARAM_EP_RANK], meta[AUTOEP_PARAM_LOGICAL_SHAPE][0] // len(meta[AUTOEP_PARAM_LOCAL_EXPERTS])


def expert_group(tensor: Tensor) -> dist.ProcessGroup | None:
    """Returns the ranks that have copies of an expert's parameter; None if ``tensor`` is that of no divided expert."""
    name = getattr(tensor, "group_name", None)
    if getattr(tensor, "allreduce", True) or name in (None, _UNDIVIDED):
        return None
    return stock_groups._get_expert_data_parallel_group_dict().get(name)


def is_of_unknown_group(tensor: Tensor) -> bool:
    """Whether a parameter says that ranks differ in it, but not by a group of DeepSpeed's experts."""
    known = (_UNDIVIDED, *stock_groups._get_expert_data_parallel_group_dict())
    return not getattr(tensor, "allreduce", True) and getattr(tensor, "group_name", None) not in known


_UNDIVIDED = "ep_size_1"
"""What DeepSpeed calls the group of experts that every rank has."""


def sizes_of(model: nn.Module) -> set[int]:
    """Returns among how many ranks each the layers of ``model`` divide their experts."""
    return {module.ep_size for module in model.modules() if isinstance(module, DividedLayer)}


def make_groups(own: set[int], data_ranks: Sequence[int], experts_last: bool) -> None:
    """Makes the groups of ranks that divide experts, where DeepSpeed's engine looks for them. Collective over all
    ranks, which may have different layers.

    Args:
        own: the sizes of the groups that layers of this rank need.
        data_ranks: the global ranks that have the same layers as this one, which divide the experts of these.
        experts_last: whether ranks with copies of an expert are neighbours, as use_data_before_expert_parallelism says.

    Raises ConfigError on all ranks if they cannot divide the experts.
    """
    sizes, ranks = sorted(set().union(*everyone(own))), len(data_ranks)
    for size in sizes:
        if ranks % size:
            raise ConfigError(
                f"ep_size of an MoE layer, or expert_parallel.autoep_size, is {size}, which does not divide the "
                f"{ranks} data-parallel ranks that share a layer; use a divisor of {ranks}, or other "
                f"{BLOCK}.pipeline_ranks"
            )
        pipeline_ranks = dist.get_world_size() // ranks
        stock_groups._create_expert_and_data_parallel(
            size, pp_size=pipeline_ranks, use_data_before_expert_parallel_=experts_last
        )
    complaint = None
    for size in sizes:
        if not set(data_ranks).issuperset(stock_groups._get_expert_parallel_group_ranks(f"ep_size_{size}")):
            complaint = (
                f"experts are divided among ranks that have other layers than data-parallel ranks {[*data_ranks]}, as "
                "an earlier engine did with other pipeline_ranks, or as a topology does whose stages are not "
                "neighbours; make one engine per job, with the axes 'pipe' and 'data' in this order"
            )
    raise_everywhere(complaint, ConfigError)


@contextmanager
def with_groups(model: nn.Module) -> Iterator[None]:
    """Gives the experts of ``model`` their groups inside the block, as DeepSpeed's engine will do."""
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    for layer in layers:
        if any(hasattr(parameter, "ds_tensor") for parameter in layer.parameters()) and layer.ep_size > 1:
            raise ConfigError(
                f"zero.Init has spread experts of an MoE layer with ep_size {layer.ep_size} over all ranks, each of "
                "which has others; build the model outside of it, or let every rank have all experts (ep_size 1)"
            )
        layer.set_deepspeed_parallelism()
    try:
        yield
    finally:
        for layer in layers:
            # It refuses to be given one twice.
            layer.deepspeed_moe.ep_group = layer.deepspeed_moe.gate.ep_group = None


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
    layout = classify_fused_gate_up_layout(*(tuple(getattr(each, "ds_shape", each.shape)) for each in (first, second)))
    return layer.expert_w3_name is None and layout is not None and layout.needs_transpose


def is_replaced(model: nn.Module) -> bool:
    """Whether layers of ``model`` are AutoEP's."""
    return any(isinstance(module, AutoEPMoELayer) for module in model.modules())


def with_all_experts(tensor: Tensor) -> Tensor:
    """Returns ``tensor`` with the experts of all ranks that divide it. These call it together."""
    slices = place_among_experts(tensor)[1]
    if slices == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(slices)]
    dist.all_gather(parts, tensor.detach().contiguous(), stock_groups._get_expert_parallel_group(f"ep_size_{slices}"))
    return torch.cat(parts)


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


def refuse_around_experts(
    model: nn.Module, settings: LgampConfig, spec: ProgramSpec, whole: bool, deferred: bool
) -> None:
    """Raises ConfigError on all ranks for what does not know divided experts.

    Args:
        model: has the layers of this rank.
        spec: the program of a step.
        whole: whether the optimizer needs whole tensors, as LAMB and Muon do.
        deferred: whether layers have no memory yet.
    """
    refused = {
        "it is built inside ds_lgamp.deferred_init(); build it outside": deferred,
        "the optimizer is LAMB or Muon; use Adam, SGD or another one that works element by element": whole,
        "zero_hpz_partition_size or mics_shard_size is given; remove it": spec.hierarchy is not None,
        f"{BLOCK}.live_checkpoint is given; remove it": settings.live_checkpoint is not None,
        f"{BLOCK}.data_rank_speeds is given, with which ranks have other numbers of micro-batches; remove it": (
            settings.data_rank_speeds is not None
        ),
    }
    reason = next((reason for reason, holds in refused.items() if holds), None)
    complaint = None
    if reason is not None and (layers := divided(model)):
        complaint = f"ranks divide the experts of a layer (ep_size {layers[0].ep_size}), but {reason}"
    raise_everywhere(complaint, ConfigError)


def whole_names(module: PipelineModule) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers of the built layers as :func:`global_names` does, but experts by their number
    among all ranks'. Such a name is the same however ranks divide them."""
    numbers: dict[int, tuple[str, int]] = {}
    for prefix, layer in built_layers(module).items():
        for path, part in layer.named_modules(prefix=prefix):
            if isinstance(part, MOELayer) and part.ep_size > 1:
                first = dist.get_rank(part.ep_group) * part.num_local_experts
                for number, expert in enumerate(part.experts.deepspeed_experts):
                    own = f"{path}.experts.deepspeed_experts."
                    numbers |= {id(tensor): (own, first + number) for _, tensor in tensors_of(expert)}
    for name, tensor in global_names(module):
        if id(tensor) in numbers:
            own, number = numbers[id(tensor)]
            name = f"{own}{number}.{name.removeprefix(own).partition('.')[2]}"
        yield name, tensor
