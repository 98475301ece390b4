"""Refuses what the engine cannot train as asked, and ranks that differ, before anything changes and on every rank."""

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
from pydantic import ValidationError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.deepspeed.config.client_optimizer import complaint_about_history
from ds_lgamp.integrations.deepspeed.config.optimizer_choice import (
    UPDATES_HALF,
    check_elementwise,
    check_optimizer_type,
    check_updates_alone,
    choice_of,
    try_out,
)
from ds_lgamp.integrations.deepspeed.config.precision import (
    accumulation_dtype,
    has_master_copies,
    parameter_dtype,
    refuse_cast_parameter,
    refuse_precision,
)
from ds_lgamp.integrations.deepspeed.config.zero import device_of_updates
from ds_lgamp.integrations.deepspeed.model.construction import DeferredParameter
from ds_lgamp.integrations.deepspeed.model.experts import is_of_unknown_group
from ds_lgamp.integrations.deepspeed.model.layer_moves import changed_layer
from ds_lgamp.integrations.deepspeed.model.module import (
    TIED_MODULES,
    PlacedModule,
    Tensors,
    built_layers,
    global_names,
    layer_types,
    over_data,
    over_pipeline,
    shown_name,
    tensors_of,
    tied_users,
)
from ds_lgamp.integrations.deepspeed.model.shared_tensors import complaint_about_memory, complaint_about_tensor_ranks
from ds_lgamp.optimizers.rounding import InEightBits
from ds_lgamp.partition.agreement import (
    Term,
    code_of,
    complaint_about_terms,
    difference,
    digest,
    everyone,
    process_terms,
    raise_everywhere,
)
from ds_lgamp.partition.quantised import is_packed

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


_SECTIONS = {
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param",
    "DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer",
    "DeepSpeedBF16Config": "bf16",
    "DeepSpeedFP16Config": "fp16",
    "HybridEngineConfig": "hybrid_engine",
    "CompileConfig": "compile",
}
"""The section of ds_config.json that each of DeepSpeed's pydantic models reads."""


def refuse_unsupported(config: Any, module: PipelineModule, optimizer: Any) -> None:
    """Raises ConfigError for a module, optimizer, scheduler or precision that the engine cannot honour. Collective over
    all ranks."""
    device = device_of_updates(config)
    if isinstance(optimizer, torch.optim.Optimizer):
        check_elementwise(optimizer, config.zero_allow_untested_optimizer, device)
        raise_everywhere(complaint_about_history(optimizer), ConfigError)
    elif optimizer is None:
        if config.optimizer_name is None:
            raise ConfigError(
                "there is no optimizer; pass one to deepspeed.initialize or name one in the JSON, or set "
                f"{BLOCK}.enabled to false for an engine that only evaluates"
            )
        check_optimizer_type(config.optimizer_name, config.zero_allow_untested_optimizer)
        _try_optimizer(config, device)
    if config.scheduler_name is not None:
        _try_scheduler(config.scheduler_name, config.scheduler_params)
    refuse_precision(config)
    _refuse_module(module)
    refuse_differing_models(module)
    raise_everywhere(_complaint_about_tensors(module), ConfigError)
    refuse_differing_freezing(module)
    raise_everywhere(_complaint_about_ties(module), ConfigError)
    raise_everywhere(complaint_about_tensor_ranks(module), ConfigError)


def refuse_cast_parameters(config: Any, module: PipelineModule, tensors: Tensors) -> None:
    """Raises ConfigError if a parameter among the ``tensors`` of all pipeline ranks has another type than DeepSpeed
    would give it."""
    for name, info in tensors.items():
        if info.is_parameter and not info.packed:
            refuse_cast_parameter(config, shown_name(module, name), info.dtype)


def refuse_optimizer(settings: LgampConfig, config: Any, kind: type | None) -> None:
    """Raises ConfigError if an optimizer of ``kind`` may need to update all chunks at once, and ``overlap_update`` is
    set, if it would not update bf16 weights as they need it, or if it updates none and they should be rounded. None is
    what a function makes: it is checked when it is made."""
    if settings.stochastic_rounding and has_master_copies(config):
        raise ConfigError(
            f"{BLOCK}.stochastic_rounding is true, but the optimizer updates weights in fp32, which nothing rounds; "
            "set bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states, or remove it"
        )
    if kind is None:
        return
    if settings.overlap_update:
        check_updates_alone(kind)
    if issubclass(kind, InEightBits):
        for key in ("stochastic_rounding", "live_checkpoint"):
            if getattr(settings, key):
                raise ConfigError(
                    f"{BLOCK}.{key} is {getattr(settings, key)!r}, but the optimizer is {kind.__name__}, with state of "
                    "8 bits; use one of 32 bits, or remove the key"
                )
    elif not has_master_copies(config) and kind not in UPDATES_HALF:
        raise ConfigError(
            f"bf16.bf16_master_weights_and_grads is True, but the optimizer is {kind.__module__}.{kind.__name__}, "
            "which is not known to update weights in bf16 well; use torch's Adam or AdamW, or remove the key"
        )


def refuse_needless_rounding(settings: LgampConfig, config: Any, pipeline_ranks: int) -> None:
    """Raises ConfigError if ``activation_dtype`` would change nothing."""
    half = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(parameter_dtype(config))
    given = f"{BLOCK}.activation_dtype is '{settings.activation_dtype}'"
    if settings.activation_dtype is not None and pipeline_ranks == 1:
        raise ConfigError(f"{given}, but one pipeline rank sends no hidden states; remove it")
    if settings.activation_dtype == "bf16" and half is not None:
        raise ConfigError(f"{given}, but under {half} hidden states have 16 bits already; use 'fp8', or remove it")


def refuse_irreproducible(settings: LgampConfig, config: Any, module: PipelineModule, tensors: Tensors) -> None:
    """Raises ConfigError if ``reproducible`` is set and the run would depend on the layout.

    Args:
        tensors: those of all pipeline ranks.
    """
    if not settings.reproducible:
        return
    trains = {name for name, info in tensors.items() if info.is_parameter and info.requires_grad}
    for key, layers in tied_users(module).items():
        if len(layers) > 1 and any(name.startswith(f"{TIED_MODULES}{key}.") for name in trains):
            raise ConfigError(
                f"{BLOCK}.reproducible is true, but layers {', '.join(map(str, layers))} share the tied module "
                f"'{key}', whose gradients add up in an order that depends on the layout; untie them or set it to false"
            )
    types = {"data_types.grad_accum_dtype": accumulation_dtype(config)}
    types["communication_data_type"] = config.communication_data_type or types["data_types.grad_accum_dtype"]
    for key, dtype in types.items():
        if config.zero_optimization_stage == 0 and dtype != torch.float32:
            raise ConfigError(
                f"{BLOCK}.reproducible is true, but at zero_optimization.stage 0 gradients are summed in {dtype}; "
                f"set {key} to 'fp32', or use another stage"
            )


def _try_optimizer(config: Any, device: torch.device) -> None:
    """Raises ConfigError if the optimizer's class does not take its ``params``. DeepSpeed would notice only later."""
    name, options = config.optimizer_name, config.optimizer_params or {}
    if "max_grad_norm" in options:
        raise ConfigError(
            f"optimizer.params.max_grad_norm is {options['max_grad_norm']}, which DeepSpeed refuses; write "
            "gradient_clipping instead"
        )
    try:
        try_out(choice_of(config, device), device)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"optimizer.params is {options}, but {name} refuses it ({sentence_of(error)})") from None


def _try_scheduler(name: str, options: dict[str, Any] | None) -> None:
    """Raises ConfigError if there is no such scheduler or it does not take its ``params``."""
    kind = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name, None)
    if kind is None:
        known = ", ".join(lr_schedules.VALID_LR_SCHEDULES)
        raise ConfigError(f"scheduler.type is '{name}', which is unknown; use {known} or one of torch's")
    if options is None:
        raise ConfigError("scheduler.params is missing; write an object such as {}")
    if any(isinstance(value, list) for value in options.values()):
        return  # There is one value for each parameter group, and only the engine knows the groups.
    try:
        kind(torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))]), **options)
    except Exception as error:
        raise ConfigError(f"scheduler.params is {options}, but {name} refuses it ({sentence_of(error)})") from None


def sentence_of(error: Exception) -> str:
    """The first complaint of an error of DeepSpeed's configuration, in one line."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        key = ".".join(map(str, (_SECTIONS.get(error.title, error.title), *first["loc"])))
        return f"{key} is {first['input']!r}: {first['msg']}"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'without a message'}"


def _refuse_module(module: PipelineModule) -> None:
    if isinstance(module, PlacedModule):
        raise ConfigError("the PipelineModule has an engine already; build a new one for another engine")
    topology = module.topology()
    for axis in topology.get_axis_names():
        if axis not in ("pipe", "data", "model") and topology.get_dim(axis) > 1:
            raise ConfigError(
                f"the topology has {topology.get_dim(axis)} ranks on axis '{axis}', but {BLOCK} takes 1 so far; "
                "use the axes 'pipe', 'data' and 'model'"
            )
    own = type(module).forward is not PipelineModule.forward or "forward" in vars(module)
    if own or module._forward_hooks or module._forward_pre_hooks:
        raise ConfigError(
            f"the {type(module).__name__} has a forward of its own, or hooks, but its layers are called one by one; "
            "put what they do into layers"
        )


def refuse_differing_freezing(module: PipelineModule) -> None:
    """Raises ConfigError on all ranks if a parameter is frozen on one rank only, or if one of packed bytes requires a
    gradient. Collective over all ranks."""
    raise_everywhere(_complaint_about_packed(module), ConfigError)
    raise_everywhere(_complaint_about_freezing(module), ConfigError)


def _complaint_about_packed(module: PipelineModule) -> str | None:
    """The sentence that refuses a parameter of packed bytes that requires a gradient; None if there is none."""
    for name, tensor in global_names(module):
        if tensor.requires_grad and isinstance(tensor, torch.nn.Parameter) and is_packed(tensor):
            return f"parameter {shown_name(module, name)} holds quantised bytes, which cannot train; freeze it"
    return None


def _complaint_about_freezing(module: PipelineModule) -> str | None:
    """The sentence that refuses a parameter which is frozen on one rank only; None if there is none. Collective over
    the ranks that have copies: data-parallel and tensor-parallel ranks have the same parameters, pipeline ranks share
    tied modules only."""
    own = {
        name: tensor.requires_grad for name, tensor in global_names(module) if isinstance(tensor, torch.nn.Parameter)
    }
    tied = {name: trains for name, trains in own.items() if name.startswith(TIED_MODULES)}
    copies = [
        *over_data(module, own),
        *everyone(own, module._grid.get_slice_parallel_group()),
        *over_pipeline(module, tied),
    ]
    for flags in copies:
        for name, trains in flags.items():
            if own.get(name, trains) != trains:
                shown = shown_name(module, name)
                return f"parameter {shown} trains on one rank and is frozen on another; freeze it on all"
    return None


def _complaint_about_ties(module: PipelineModule) -> str | None:
    """The sentence that refuses tied modules that differ between pipeline ranks; None if none do. Collective over the
    pipeline ranks."""
    own = {
        key: (type(layer).__qualname__, {name: list(tensor.shape) for name, tensor in tensors_of(layer)})
        for key, layer in module.tied_modules.items()
    }
    known: dict[str, Any] = {}
    for there in over_pipeline(module, own):
        for key, built in there.items():
            if known.setdefault(key, built) != built:
                return (
                    f"the TiedLayerSpecs of key '{key}' build {known[key][0]} and {built[0]}, but the whole module is "
                    "shared; give them one class that builds alike, and say by forward_fn what differs"
                )
    return None


def _complaint_about_tensors(module: PipelineModule) -> str | None:
    """The sentence that refuses this rank's parameters; None if nothing is wrong with them."""
    names: dict[int, str] = {}
    tensors = [*global_names(module)]
    for name, tensor in tensors:
        if isinstance(tensor, torch.nn.Parameter) and names.setdefault(id(tensor), name) != name:
            return (
                f"{shown_name(module, name)} and {shown_name(module, names[id(tensor)])} are the same tensor; give "
                "each layer its own or, in a PipelineModule, share the layer by TiedLayerSpec"
            )
    for name, parameter in module.named_parameters():
        shown = shown_name(module, name)
        if parameter.requires_grad and id(parameter) not in names:
            return f"parameter {shown} belongs to no layer of the PipelineModule; make its owner a layer, or freeze it"
        if not isinstance(parameter, DeferredParameter) and type(parameter.data) not in (torch.Tensor, FakeTensor):
            fix = "build its layer without fp8_model_init or DTensor"
            if type(parameter.data).__module__.partition(".")[0] == "torchao":
                fix = "call torchao.utils.unwrap_tensor_subclass(model) before deepspeed.initialize"
            return f"parameter {shown} is a {type(parameter.data).__name__}, but units hold plain tensors; {fix}"
        if is_of_unknown_group(parameter) or hasattr(parameter, "ds_optim_param"):
            return (
                f"parameter {shown} differs between data-parallel ranks, but not as experts of deepspeed.moe; let "
                "every rank have all experts (ep_size 1), and use layers without sharded weights"
            )
    shared = complaint_about_memory((shown_name(module, name), tensor) for name, tensor in tensors)
    if shared is not None:
        return shared
    changed = changed_layer(module)
    if changed is not None:
        return (
            f"layer {changed} was built inside ds_lgamp.deferred_init() and changed since, but is built anew from its "
            "LayerSpec; change it after deepspeed.initialize, or build the PipelineModule outside"
        )
    return None
