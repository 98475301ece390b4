"""The types in which a run computes, accumulates and communicates, what travels rounded, and fp16's loss scaler."""

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import LAMB_OPTIMIZER, DtypeEnum
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, LossScalerBase

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.cost.units import Travel
from ds_lgamp.integrations.deepspeed.config.check_keys import FROZEN, GRADIENTS, QUANTISED, WEIGHTS
from ds_lgamp.integrations.program_spec import HPZ, MICS, shard_groups

_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""The fields of DeepSpeed's dynamic loss scaler that change from step to step. The configuration sets the others."""


def parameter_dtype(config: Any) -> torch.dtype:
    """The type to which a DeepSpeedConfig casts parameters."""
    if config.float16_config.enabled:
        return torch.float16
    return torch.bfloat16 if config.bfloat16_config.enabled else torch.float32


def accumulation_dtype(config: Any) -> torch.dtype:
    """The type in which gradients accumulate. As in DeepSpeed, the default is the type of the parameters."""
    named = config.grad_accum_dtype
    return parameter_dtype(config) if named is None else DtypeEnum(named).value


def input_dtype(config: Any) -> torch.dtype | None:
    """The type to which floating-point inputs of the first layer are cast; None leaves them as they are."""
    return torch.float16 if config.float16_config.enabled and config.float16_config.auto_cast else None


def has_master_copies(config: Any) -> bool:
    """Whether the optimizer updates fp32 copies of half-precision parameters, and not these themselves."""
    return not config.bfloat16_config.bf16_master_weights_and_grads


def refuse_precision(config: Any) -> None:
    """Raises ConfigError if the types of a DeepSpeedConfig contradict each other, if the device lacks one, or if
    DeepSpeed would refuse the loss scale later."""
    if not has_master_copies(config) and not config.bfloat16_config.bf16_optimizer_states:
        raise ConfigError(
            "bf16.bf16_master_weights_and_grads is True, but bf16.bf16_optimizer_states is False, and the optimizer's "
            "state has the type of the weights that it updates; set both"
        )
    if config.float16_config.enabled and not get_accelerator().is_fp16_supported():
        raise ConfigError(
            f"fp16.enabled is True, but DeepSpeed says that this device ({get_accelerator().device_name()}) has no "
            "fp16; use bf16 or remove it"
        )
    parameters = parameter_dtype(config)
    if config.param_dtype is not None and DtypeEnum(config.param_dtype).value != parameters:
        raise ConfigError(
            f"data_types.param_dtype is '{config.param_dtype}', but fp16.enabled and bf16.enabled make parameters "
            f"{parameters}; change one of them"
        )
    if config.optimizer_name == LAMB_OPTIMIZER and config.float16_config.loss_scale:
        raise ConfigError(
            f"fp16.loss_scale is {config.float16_config.loss_scale:g}, but DeepSpeed takes optimizer.type Lamb with a "
            "dynamic loss scale only; set it to 0 or remove it"
        )


def refuse_cast_parameter(config: Any, name: str, dtype: torch.dtype) -> None:
    """Raises ConfigError for a parameter that is complex or in fp8, or that is not fp32 although the configuration asks
    for fp32. Parameters of packed bytes are never cast.

    Args:
        name: the parameter's name in the whole model.
        dtype: the parameter's type as the user built it.
    """
    if dtype.is_complex:
        raise ConfigError(f"parameter {name} is {dtype}, which a {BLOCK} block does not train; make it a buffer")
    if dtype.itemsize == 1:
        raise ConfigError(f"parameter {name} is {dtype}, which a cast would change; quantize it to whole numbers")
    if dtype != torch.float32 and parameter_dtype(config) == torch.float32:
        if dtype == torch.float64:
            raise ConfigError(f"parameter {name} is {dtype}, which a {BLOCK} block does not train; make it float32")
        key = "fp16" if dtype == torch.float16 else "bf16"
        raise ConfigError(f"parameter {name} is {dtype}, but {key}.enabled is false; set it or remove the cast")


def checks_overflow(config: Any) -> bool:
    """Whether the engine skips a step if any gradient is inf or NaN."""
    return config.float16_config.enabled or (
        config.bfloat16_config.enabled and config.bfloat16_config.check_grad_overflow
    )


def loss_scaler(config: Any) -> LossScalerBase:
    """DeepSpeed's loss scaler: dynamic or static with fp16, otherwise one that leaves the loss as it is."""
    fp16 = config.float16_config
    return CreateLossScaler(
        parameter_dtype(config), fp16.loss_scale, fp16.loss_scale == 0, fp16.dynamic_loss_scale_args()
    )


def scaler_state(scaler: LossScalerBase) -> dict[str, Any] | None:
    """The state of a dynamic scaler for a checkpoint; None for a static one, which the configuration describes.

    The state includes the settings, for readers of the checkpoint that have no configuration.
    """
    return {name: value for name, value in vars(scaler).items() if name != "dtype"} if scaler.dynamic else None


def load_scaler_state(scaler: LossScalerBase, state: dict[str, Any] | None) -> None:
    """Sets ``scaler`` to a state of :func:`scaler_state`, if both are dynamic."""
    if scaler.dynamic and state is not None:
        for name in _SCALER_STATE:
            setattr(scaler, name, state[name])


_WEIGHT_BITS = 8
_AGAINST_ROUNDING = {
    HPZ: "keeps shards in nodes",
    MICS: "keeps shards in nodes",
    "reproducible": "promises the same bits in every layout",
    "communication_data_type": "says how gradients travel, too",
    "keep_frozen": "says that frozen weights do not travel",
}
"""What other keys say, in words."""


def travel_of(settings: LgampConfig, given: Mapping[str, Any], config: Any) -> Travel:
    """Returns what travels rounded. Raises ConfigError where a key would mean nothing, or what nobody has thought of.

    Args:
        given: ds_config.json, as the user wrote it.
        config: the DeepSpeedConfig.
    """
    section, stage = given.get("zero_optimization"), int(config.zero_config.stage)
    # DeepSpeed still takes true for stage 1.
    asked = [name for name in QUANTISED if isinstance(section, Mapping) and section.get(name)]
    if settings.quantised_gradient_bits != 8 and GRADIENTS not in asked:
        raise ConfigError(
            f"{BLOCK}.quantised_gradient_bits is {settings.quantised_gradient_bits}, but "
            f"zero_optimization.{GRADIENTS} is not true; set it, or remove quantised_gradient_bits"
        )
    for name in asked:
        _refuse_rounding(name, settings, given, stage)
    return Travel(
        weights=_WEIGHT_BITS if WEIGHTS in asked else None,
        frozen=_WEIGHT_BITS if WEIGHTS in asked or FROZEN in asked else None,
        gradients=settings.quantised_gradient_bits if GRADIENTS in asked else None,
    )


def _refuse_rounding(name: str, settings: LgampConfig, given: Mapping[str, Any], stage: int) -> None:
    """Raises ConfigError if ``name``, one of the :data:`QUANTISED` keys, means nothing or contradicts another key."""
    said = f"zero_optimization.{name} is true"
    least = 1 if name == GRADIENTS else 3
    if stage < least:
        stages = "stage 1, 2 or 3" if least == 1 else "stage 3"
        raise ConfigError(f"{said}, but zero_optimization.stage is {stage}; use {stages}, or remove it")
    others = {
        f"zero_optimization.{next(iter(shard_groups(given)), '')}": stage == 3 and bool(shard_groups(given)),
        f"{BLOCK}.reproducible": settings.reproducible,
        "communication_data_type": name == GRADIENTS and given.get("communication_data_type") is not None,
        f"{BLOCK}.keep_frozen": name == FROZEN and settings.keep_frozen in ("device", "host"),
    }
    other = next((other for other, holds in others.items() if holds), None)
    if other is not None:
        raise ConfigError(f"{said}, but {other} {_AGAINST_ROUNDING[other.split('.')[-1]]}; remove one of them")
