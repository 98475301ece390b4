"""The engine's methods for checkpoints. Those that DeepSpeed has too keep their signatures."""

from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from ds_lgamp.checkpoint.errors import everywhere
from ds_lgamp.checkpoint.saver import wait_for_all
from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.deepspeed.checkpoint.fitting import Parts
from ds_lgamp.integrations.deepspeed.checkpoint.fp32_weights import put_script
from ds_lgamp.integrations.deepspeed.checkpoint.live import LiveCheckpoint
from ds_lgamp.integrations.deepspeed.checkpoint.loading import find_checkpoints, load_first_whole
from ds_lgamp.integrations.deepspeed.checkpoint.run import Run
from ds_lgamp.integrations.deepspeed.checkpoint.saving import save


class TensorAccess(Protocol):
    """Gathers parameters for the user."""

    def refuse_inside_block(self, call: str) -> None:
        """Raises ConfigError where ``call`` would interfere with parameters that are gathered."""


class Engine(Run, Protocol):
    """An engine that saves and loads checkpoints."""

    @property
    def global_steps(self) -> int: ...

    @property
    def live(self) -> LiveCheckpoint | None: ...

    @property
    def tensor_access(self) -> TensorAccess: ...

    def settle_nonfinite(self) -> None:
        """Acts on the last batch, if it is not finite."""

    def forget_nonfinite(self) -> None:
        """Forgets the last batch."""


def save_checkpoint(
    engine: Engine,
    save_dir: str,
    tag: Any = None,
    client_state: dict[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """As PipelineEngine's, with random states and the position in ``training_data``; loads at any layout. Raises
    CheckpointError on every rank if it cannot be written; an asynchronous save raises it in the next call.

    Without frozen parameters, it loads with ``load_module_strict=False``, and the model keeps those that it has.
    """
    # With "abort", weights that are not finite never get into a checkpoint.
    engine.settle_nonfinite()
    if engine.live is not None:
        engine.live.saves_in(Path(save_dir))
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    save(
        engine,
        Path(save_dir),
        tag,
        {} if client_state is None else client_state,
        save_latest,
        exclude_frozen_parameters,
    )
    everywhere(partial(put_script, Path(save_dir)) if dist.get_rank() == 0 else lambda: None)
    return True


def load_checkpoint(
    engine: Engine,
    load_dir: str,
    tag: Any = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Any = None,
) -> tuple[str | None, dict[str, Any] | None]:
    """As PipelineEngine's, for what :func:`save_checkpoint` wrote, at any layout. Raises CheckpointError on every rank,
    and changes nothing, if the checkpoint does not fit. Without a ``tag``, the newest whole one is loaded where files
    of the last one are missing or damaged."""
    if custom_load_fn is not None:
        raise ConfigError(f"custom_load_fn is given, but a {BLOCK} block does not support it; remove it")
    engine.tensor_access.refuse_inside_block("load_checkpoint")
    wait_for_all()
    live = None if load_module_only else engine.live
    if live is not None:
        live.loads_from(Path(load_dir))
        if tag is None:
            live.publish(Path(load_dir))
    candidates = find_checkpoints(Path(load_dir), tag)
    if not candidates:
        return None, None
    parts = Parts(
        strict=load_module_strict,
        optimizer=load_optimizer_states and not load_module_only,
        scheduler=load_lr_scheduler_states and not load_module_only,
        progress=not load_module_only,
    )
    folder, client_state = load_first_whole(engine, Path(load_dir), candidates, parts)
    engine.forget_nonfinite()
    if engine.live is not None:
        engine.live.forget()
    return str(folder), client_state


def wait_for_checkpoint(engine: Engine) -> None:
    """Waits until the last save is on the disk. Collective; raises CheckpointError on every rank if it failed."""
    engine.saver.wait()
