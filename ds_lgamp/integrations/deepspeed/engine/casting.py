"""Gives the tensors of a module the data types of the configuration."""

from typing import Any

from deepspeed.runtime.keep_in_fp32 import keep_in_fp32_pattern


def cast_and_move(engine: Any) -> None:
    """Casts the tensors of ``engine.module`` as DeepSpeed does, and moves them to the engine's device."""
    data_type, buffer_type = engine._mixed_precision_dtypes()
    if data_type is not None:
        kept = keep_in_fp32_pattern(engine.module, engine._config.keep_in_fp32_modules, data_type)
        engine._cast_module_mixed_precision(data_type, buffer_type, False, kept)
    engine.module.to(engine.device)


def prepare_layers(engine: Any) -> None:
    """Casts, moves and broadcasts the layers that ``engine.module`` shows, as DeepSpeed does with a module."""
    cast_and_move(engine)
    engine._broadcast_model()
