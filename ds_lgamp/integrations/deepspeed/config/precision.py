"""In which types a run computes, accumulates and communicates, and what keeps fp16 in range."""

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DtypeEnum
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, LossScalerBase

from ds_lgamp.config import ConfigError

_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What moves in DeepSpeed's dynamic loss scaler; the rest is the configuration's."""


def parameter_dtype(config: Any) -> torch.dtype:
    """The type a DeepSpeedConfig casts parameters to."""
    if config.float16_config.enabled:
        return torch.float16
    return torch.bfloat16 if config.bfloat16_config.enabled else torch.float32


def accumulation_dtype(config: Any) -> torch.dtype:
    """The type gradients accumulate in: the parameters' if the configuration says nothing, as in DeepSpeed."""
    named = config.grad_accum_dtype
    return parameter_dtype(config) if named is None else DtypeEnum(named).value


def input_dtype(config: Any) -> torch.dtype | None:
    """What floating-point inputs of the first layer are cast to; None leaves them as they are."""
    return torch.float16 if config.float16_config.enabled and config.float16_config.auto_cast else None


def refuse_precision(config: Any) -> None:
    """Raises ConfigError where the types of a DeepSpeedConfig do not go together or the device lacks one."""
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


def refuse_cast_parameter(config: Any, name: str, dtype: torch.dtype) -> None:
    """Raises ConfigError if the user made a parameter another type than fp32 and the configuration asks for none, or
    one that no precision casts."""
    if not dtype.is_floating_point:
        raise ConfigError(f"parameter {name} is {dtype}, which does not train; make it a buffer")
    if dtype != torch.float32 and parameter_dtype(config) == torch.float32:
        key = "fp16" if dtype == torch.float16 else "bf16"
        raise ConfigError(f"parameter {name} is {dtype}, but {key}.enabled is false; set it or remove the cast")


def checks_overflow(config: Any) -> bool:
    """Whether a step whose gradient is not finite is skipped."""
    return config.float16_config.enabled or (
        config.bfloat16_config.enabled and config.bfloat16_config.check_grad_overflow
    )


def loss_scaler(config: Any) -> LossScalerBase:
    """DeepSpeed's scaler: dynamic or static with fp16, otherwise one that leaves the loss as it is."""
    fp16 = config.float16_config
    return CreateLossScaler(
        parameter_dtype(config), fp16.loss_scale, fp16.loss_scale == 0, fp16.dynamic_loss_scale_args()
    )


def scaler_state(scaler: LossScalerBase) -> dict[str, Any] | None:
    """What a checkpoint keeps of a dynamic scaler; None of a static one, which is the configuration's. Its settings are
    kept for whom they cannot be had from a configuration."""
    return {name: value for name, value in vars(scaler).items() if name != "dtype"} if scaler.dynamic else None


def load_scaler_state(scaler: LossScalerBase, state: dict[str, Any] | None) -> None:
    """Goes on where the scaler of :func:`scaler_state` stood, if both are dynamic."""
    if scaler.dynamic and state is not None:
        for name in _SCALER_STATE:
            setattr(scaler, name, state[name])
