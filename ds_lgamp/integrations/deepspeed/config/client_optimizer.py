"""Handles the user's optimizer and its groups before layers move and shards take the place of whole parameters."""

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.config.optimizer_choice import comes_from, in_place_of, takes_norms, translated
from ds_lgamp.integrations.deepspeed.model.layer_moves import place_layers
from ds_lgamp.integrations.deepspeed.model.module import Layout, global_names, over_data, over_pipeline, shown_name
from ds_lgamp.integrations.deepspeed.model.shared_tensors import sharing_of
from ds_lgamp.optimizers.muon import MATRIX_OPTIONS, OTHER_OPTIONS
from ds_lgamp.optimizers.rounding import InEightBits, class_in_8_bits
from ds_lgamp.partition.agreement import everyone, raise_everywhere

_OF_PARAMETERS = ("params", "param_names")
"""The keys of a group that list its parameters; all other keys are options."""


class ParameterGroups:
    """The optimizer group of every parameter by its global name. Every rank knows all groups before layers move.

    Collective over all ranks. Raises ConfigError on all ranks if the groups of one rank do not fit.

    Args:
        module: the module before its layers move.
        groups: the optimizer's ``param_groups`` or the user's ``model_parameters``.
    """

    def __init__(self, module: PipelineModule, groups: list[dict[str, Any]]) -> None:
        names = {id(tensor): name for name, tensor in global_names(module)}
        own: dict[str, Any] = {}
        options = _options(groups)
        complaint = None
        for index, group in enumerate(groups):
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    complaint = (
                        f"parameter group {index} holds a tensor of shape {list(parameter.shape)} that belongs to no "
                        "layer of the PipelineModule; make its owner a layer, or leave it out"
                    )
                elif own.setdefault(name, index) != index:
                    shown = shown_name(module, name)
                    complaint = f"parameter {shown} is in parameter groups {own[name]} and {index}; keep it in one"
        raise_everywhere(complaint, ConfigError)
        trains = any(parameter.requires_grad for group in groups for parameter in group["params"])
        ranks = over_pipeline(module, (own, repr(options), trains))
        if len({described for _, described, _ in ranks}) > 1:
            raise ConfigError(
                "the optimizer's parameter groups differ between pipeline ranks; give every rank the same groups in "
                "the same order, empty ones included"
            )
        if not any(trains for _, _, trains in ranks):
            raise ConfigError("the optimizer holds no parameter that trains; unfreeze one, or give it others")
        self.by_name: dict[str, int] = {name: index for names, _, _ in ranks for name, index in names.items()}
        fingerprint = hashlib.sha256(repr((sorted(self.by_name.items()), options)).encode()).hexdigest()
        if len(set(over_data(module, fingerprint))) > 1:
            raise ConfigError(
                "the optimizer's parameter groups differ between data-parallel ranks; give every rank the same ones"
            )

    def rewrite(self, module: PipelineModule, groups: list[dict[str, Any]]) -> None:
        """Puts the current parameters of this rank into ``groups``, in place; see :func:`add_placeholders`."""
        for group in groups:
            group["params"] = []
            group.pop("param_names", None)
        for name, tensor in global_names(module):
            if name in self.by_name:
                groups[self.by_name[name]]["params"].append(tensor)
        add_placeholders(groups)


def add_placeholders(groups: list[dict[str, Any]]) -> None:
    """Gives every group without parameters on this rank an empty one, because DeepSpeed drops empty groups while
    schedulers count them, and because ranks number groups alike."""
    for group in groups:
        group["params"] = group["params"] or [nn.Parameter(torch.empty(0))]


def _options(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the options of groups as ranks compare them. A tensor would name its device."""
    return [
        {
            key: value.tolist() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key not in _OF_PARAMETERS
        }
        for group in groups
    ]


def place_with_groups(module: PipelineModule, layout: Layout, arguments: dict[str, Any]) -> None:
    """Moves the layers of ``module``, and with them the parameters in the user's groups. Collective over all ranks.

    Args:
        layout: the new place of every layer.
        arguments: the arguments of ``deepspeed.initialize``. If they have an ``optimizer``, its groups change in
            place; otherwise ``model_parameters`` are replaced.

    Raises ConfigError on all ranks if the groups of one rank do not fit.
    """
    client, parameters = arguments.get("optimizer"), arguments.get("model_parameters")
    if isinstance(client, torch.optim.Optimizer):
        groups, grouped = client.param_groups, True
    else:
        groups, grouped = as_groups(trainable_parameters(module) if parameters is None else parameters)
        arguments["model_parameters"] = None
    parameter_groups = ParameterGroups(module, groups)
    place_layers(module, layout)
    parameter_groups.rewrite(module, groups)
    if not isinstance(client, torch.optim.Optimizer):
        arguments["model_parameters"] = groups if grouped else groups[0]["params"]


def as_groups(parameters: Iterable[Any]) -> tuple[list[dict[str, Any]], bool]:
    """Returns ``model_parameters`` as groups, and whether the user passed groups rather than plain parameters."""
    listed = list(parameters)
    if listed and isinstance(listed[0], dict):
        return [{**group, "params": _without_names(group["params"])} for group in listed], True
    return [{"params": _without_names(listed)}], False


def _without_names(parameters: Any) -> list[nn.Parameter]:
    """Returns the parameters of a group as a list. torch takes one tensor or several, with or without names."""
    listed: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return [entry[1] if isinstance(entry, tuple) else entry for entry in listed]


def trainable_parameters(module: PipelineModule) -> list[nn.Parameter]:
    """Returns the parameters that DeepSpeed trains if the user names none."""
    return [tensor for _, tensor in global_names(module) if isinstance(tensor, nn.Parameter) and tensor.requires_grad]


def complaint_about_history(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns why ``optimizer`` cannot be used after it has taken steps: its state belongs to whole parameters. Returns
    None if it has taken no step."""
    if type(optimizer) is torch.optim.Adagrad:
        stepped = any(bool(state["step"]) for state in optimizer.state.values())
    else:
        stepped = any(optimizer.state.values())
    if not stepped:
        return None
    return (
        f"optimizer is {type(optimizer).__name__} with state for whole parameters, which shards cannot take over; pass "
        "a new one that has loaded no state"
    )


def prepare_optimizer(module: PipelineModule, config: Any, arguments: dict[str, Any]) -> None:
    """Replaces an optimizer that needs whole tensors by its counterpart on shards, and splits the groups of the Muon
    that ds_config.json names. Collective over all ranks.

    Args:
        config: the DeepSpeedConfig.
        arguments: those of ``deepspeed.initialize``; ``optimizer`` or ``model_parameters`` change.

    Raises ConfigError on all ranks if a group of matrices holds something else.
    """
    given, groups = arguments.get("optimizer"), []
    if isinstance(given, torch.optim.Optimizer):
        groups = given.param_groups
    elif given is None and config.optimizer_name == "muon":
        parameters = arguments.get("model_parameters")
        groups = split_for_muon(trainable_parameters(module) if parameters is None else parameters)
    raise_everywhere(_complaint_about_matrices(module, groups), ConfigError)
    # Layers may move to other pipeline ranks.
    asked = over_pipeline(module, given.exact if isinstance(given, InEightBits) else frozenset())
    if isinstance(given, InEightBits):
        given.exact = given.exact.union(*asked)
    elif isinstance(given, torch.optim.Optimizer):
        arguments["optimizer"] = translated(given)
    elif given is not None:
        arguments["optimizer"] = partial(_made_by, module, given)
    elif config.optimizer_name == "muon":
        arguments["model_parameters"] = groups


def on_shards(module: PipelineModule, optimizer: Any) -> Any:
    """Returns what takes the place of an ``optimizer`` whose state has 8 bits, and knows which parameters have 32; any
    other, or None, as it is. Collective over all ranks. Raises ConfigError on all of them if shards cannot have such
    state."""
    made, asked, complaint = optimizer, set(), None
    try:
        made = in_8_bits(optimizer)
        # Pipeline ranks have layers of their own, for which the script may ask for something.
        asked = asked_in_32_bits(made)
    except ConfigError as error:
        complaint = str(error)
    raise_everywhere(complaint, ConfigError)
    if isinstance(made, InEightBits):
        if module._grid.get_slice_parallel_world_size() > 1:
            raise ConfigError(
                f"optimizer is {type(optimizer).__name__}, but tensor-parallel ranks have slices of parameters, whose "
                "blocks would have other scales; use one of 32 bits"
            )
        made.exact = frozenset(name for name, tensor in global_names(module) if id(tensor) in asked)
    return made


def in_8_bits(optimizer: Any) -> Any:
    """Returns what takes the place of ``optimizer`` if bitsandbytes keeps its state in 8 bits; else ``optimizer``. As
    :func:`translated`, it has the same groups and hooks.

    Raises ConfigError if shards cannot have such state.
    """
    kind, args = type(optimizer), getattr(optimizer, "args", None)
    if isinstance(optimizer, InEightBits) or getattr(args, "optim_bits", 32) != 8:
        return optimizer
    made = class_in_8_bits(getattr(optimizer, "optimizer_name", ""))
    # A subclass of another library, as GaLore's, may step in another way.
    is_own = kind.__module__.startswith("bitsandbytes.")
    if made is None or not is_own or takes_norms(args) or not getattr(args, "block_wise", True):
        raise ConfigError(
            f"optimizer is {kind.__name__}, whose state of 8 bits needs whole tensors; use bitsandbytes' AdamW8bit or "
            "Lion8bit, or one of 32 bits, such as paged_adamw_32bit"
        )
    return in_place_of(optimizer, made(optimizer))


def asked_in_32_bits(optimizer: torch.optim.Optimizer) -> set[int]:
    """Returns the ids of the parameters whose state bitsandbytes would keep in 32 bits, because the script has told its
    manager so. Raises ConfigError if it asks for anything else. One of bitsandbytes' with state of 32 bits may ask for
    nothing else either."""
    narrow = isinstance(optimizer, InEightBits)
    if not (narrow or comes_from("bitsandbytes", type(optimizer))):
        return set()
    manager = import_module("bitsandbytes.optim").GlobalOptimManager.get_instance()
    modules = ((id(getattr(module, name, None)), own) for module, name, own in manager.module_weight_config_triple)
    asked: dict[int, dict[str, Any]] = {**manager.pid2config, **dict(modules)}
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in own & asked.keys():
        other = [key for key in asked[parameter] if key != "optim_bits"]
        if other:
            raise ConfigError(
                f"GlobalOptimManager overrides {other[0]} of a parameter, and shards take optim_bits alone; put the "
                "parameter into a group with options of its own"
            )
        if not narrow and asked[parameter]["optim_bits"] != 32:
            raise ConfigError(
                "GlobalOptimManager overrides optim_bits of a parameter, but the optimizer is "
                f"{type(optimizer).__name__} of 32 bits; use AdamW8bit, and override the other parameters with 32"
            )
    return {parameter for parameter in own & asked.keys() if asked[parameter].get("optim_bits") == 32}


def _made_by(
    module: PipelineModule, given: Callable[[Any], torch.optim.Optimizer], parameters: Any
) -> torch.optim.Optimizer:
    """Returns the optimizer that a callable makes. Collective over all ranks.

    Raises ConfigError on all ranks if the groups of their optimizers have other options, or another order.
    """
    made = given(parameters)
    if len(set(everyone(repr(_options(made.param_groups))))) > 1:
        raise ConfigError(
            "the parameter groups that the optimizer's callable makes differ between ranks; let it make the same "
            "groups in the same order, empty ones included"
        )
    add_placeholders(made.param_groups)
    return translated(on_shards(module, made))


def split_for_muon(parameters: Any) -> list[dict[str, Any]]:
    """Returns every group of ``parameters`` as two: hidden matrices, for Muon, and the rest, for AdamW.

    As in DeepSpeed, hidden matrices are what ``deepspeed.initialize`` marks with ``use_muon``: parameters of two or
    more dimensions whose names contain neither "embed" nor "lm_head". A group with a ``use_muon`` of its own stays
    whole.
    """
    split = []
    for group in as_groups(parameters)[0]:
        if "use_muon" in group:
            split.append(group)
            continue
        for uses_muon, known in ((True, MATRIX_OPTIONS), (False, OTHER_OPTIONS)):
            options = {key: value for key, value in group.items() if key in known}
            hidden = ((each, bool(getattr(each, "use_muon", each.dim() > 1))) for each in group["params"])
            own = [parameter for parameter, is_hidden in hidden if is_hidden == uses_muon]
            split.append({**options, "params": own, "use_muon": uses_muon})
    return split


def _complaint_about_matrices(module: PipelineModule, groups: list[dict[str, Any]]) -> str | None:
    """Returns the sentence that refuses a parameter in a group of matrices; None if all are matrices."""
    names = {id(tensor): name for name, tensor in global_names(module)}
    tensor_ranks = module._grid.get_slice_parallel_world_size()
    for group in groups:
        for parameter in group["params"] if group.get("use_muon") else ():
            name, blocks = names.get(id(parameter), "of a group"), group.get("blocks", 1)
            if not parameter.requires_grad:
                continue
            shown = shown_name(module, name)
            if parameter.dim() != 2:
                return (
                    f"parameter {shown} has shape {list(parameter.shape)}, but Muon makes matrices orthogonal; put it "
                    "into a group with use_muon False"
                )
            sliced = tensor_ranks > 1 and sharing_of(name, parameter).sliced_dimension == 0
            rows = parameter.shape[0] * (tensor_ranks if sliced else 1)
            if rows % blocks:
                return (
                    f"parameter {shown} has {rows} rows, but its group has blocks {blocks}; use a divisor of the rows"
                )
    return None
