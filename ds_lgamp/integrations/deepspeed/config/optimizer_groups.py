"""Prepares the user's optimizer and its groups for an engine, before layers move."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.pipe.module import PipelineModule

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.config.whole_tensors import translated
from ds_lgamp.integrations.deepspeed.model.client_optimizer import (
    add_placeholders,
    as_groups,
    refuse_differing_groups,
    trainable_parameters,
)
from ds_lgamp.integrations.deepspeed.model.module import global_names, shown_name
from ds_lgamp.integrations.deepspeed.model.shared_tensors import sharing_of
from ds_lgamp.optimizers.muon import MATRIX_OPTIONS, OTHER_OPTIONS
from ds_lgamp.partition.agreement import raise_everywhere


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
    if isinstance(given, torch.optim.Optimizer):
        arguments["optimizer"] = translated(given)
    elif given is not None:
        arguments["optimizer"] = partial(_called, given)
    elif config.optimizer_name == "muon":
        arguments["model_parameters"] = groups


def _called(given: Callable[[Any], torch.optim.Optimizer], parameters: Any) -> torch.optim.Optimizer:
    """Returns the optimizer that a callable makes. Collective over all ranks."""
    made = given(parameters)
    refuse_differing_groups(made.param_groups)
    add_placeholders(made.param_groups)
    return translated(made)


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
            own = [parameter for parameter in group["params"] if _is_hidden(parameter) == uses_muon]
            split.append({**options, "params": own, "use_muon": uses_muon})
    return split


def _is_hidden(parameter: torch.nn.Parameter) -> bool:
    return bool(getattr(parameter, "use_muon", parameter.dim() > 1))


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
