"""Methods of DeepSpeed's engine that would not do here what they do there, with DeepSpeed's signatures."""

from typing import Any

from ds_lgamp.config import BLOCK, ConfigError


def check_batch_size(train_batch_size: int, micro_batch: int, ranks: int) -> None:
    """Raises ConfigError if whole micro-batches of all ``ranks`` that draw data do not make the batch."""
    each = micro_batch * ranks
    if train_batch_size < each or train_batch_size % each:
        raise ConfigError(
            f"train_batch_size is {train_batch_size}, but {ranks} ranks with micro-batches of {micro_batch} make "
            f"multiples of {each}; use one of them"
        )


def offload_states(engine: Any, *positional: Any, **named: Any) -> None:
    """Raises ConfigError."""
    raise ConfigError(
        f"engine.offload_states is called, but with a {BLOCK} block states move to the host only as the program says; "
        "remove the call, and use zero_optimization.offload_optimizer"
    )


def reload_states(engine: Any, *positional: Any, **named: Any) -> None:
    """Does nothing: no states were offloaded."""


def save_16bit_model(engine: Any, *positional: Any, **named: Any) -> bool:
    """Raises ConfigError: a pipeline has no model whose names such a file could have."""
    raise ConfigError(
        "engine.save_16bit_model is called for a PipelineModule, which stock DeepSpeed cannot save so either; use "
        "engine.save_checkpoint and ds_lgamp checkpoint export, or torch.save(engine.module.state_dict(), ...)"
    )
