"""The live state of a training run: what it holds of each step, and how the next run continues from it."""

import logging
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from uuid import uuid4
from weakref import WeakSet

import torch
import torch.distributed as dist

from ds_lgamp.checkpoint.live_recovery import last_step, publish_newest
from ds_lgamp.checkpoint.live_state import BesideUnits, LiveState
from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.cost.live import slots_of
from ds_lgamp.integrations.deepspeed.checkpoint.description import Run, describe, ranks_of, share_of
from ds_lgamp.integrations.deepspeed.checkpoint.rank_state import rank_state
from ds_lgamp.integrations.deepspeed.model.module import persistent_buffers
from ds_lgamp.partition.agreement import everyone, raise_everywhere

logger = logging.getLogger(__name__)
_alive: WeakSet["LiveCheckpoint"] = WeakSet()


def end_all() -> None:
    """Ends the live states of all engines of this process."""
    for live in list(_alive):
        live.end()


class LiveCheckpoint:
    """Keeps the state of the engine's last step in a folder of this node. Collective over all ranks.

    Args:
        engine: with all its parameters.
        folder: of the live states.
    """

    def __init__(self, engine: Run, folder: Path) -> None:
        self._folder = folder
        self._run = everyone(uuid4().hex[:8])[0]
        self._directory: str | None = None
        """Where the run saves and loads checkpoints; None if it has not yet."""
        self._saved_in: Path | None = None
        """Where it has saved one; None if it has not yet."""
        optimizer = engine.optimizer
        self._rank = dist.get_rank()
        self._state = LiveState(
            folder,
            {
                "run": self._run,
                "rank": self._rank,
                "ranks": dist.get_world_size(),
                "places": list(ranks_of(engine)),
            },
            optimizer.partition.units,
            optimizer.optimizer,
            engine.device,
            slots_of(engine.program_spec.updates),
            share_of(engine),
        )
        self._is_over = False
        _alive.add(self)

    def before_step(self) -> None:
        """Waits for the state of the last step, before the optimizer's step."""
        self._state.before_step()

    def end_step(self, engine: Run, client_state: dict[Any, Any]) -> None:
        """Ends a step, after which nothing of it changes but by updates that it has postponed."""
        with torch.no_grad():
            buffers = {name: tensor.clone() for name, tensor in persistent_buffers(engine.placed) if tensor.numel()}
        state, own = describe(engine), rank_state(engine, client_state)
        self._state.end_step(BesideUnits(engine.global_steps, self._directory, state, own, buffers))

    def saves_in(self, directory: Path) -> None:
        """Notes where the run saves a checkpoint."""
        self._saved_in = directory.resolve()
        self._directory = str(self._saved_in)

    def loads_from(self, directory: Path) -> None:
        """Notes where the run loads a checkpoint, and will probably save."""
        self._directory = str(directory.resolve())

    def publish(self, directory: Path) -> None:
        """Makes the newest whole state of an earlier run a checkpoint in ``directory``, unless that has one as new.
        Collective over all ranks; raises CheckpointError on all."""
        publish_newest(self._folder, directory, self._run)

    def forget(self) -> None:
        """Drops the states of this run, after it has loaded another one."""
        self._state.forget()

    def wait(self) -> None:
        """Waits until the state of the last step is in the folder, if no update of it is postponed. Raises
        CheckpointError if it cannot be written."""
        self._state.wait()

    def uses(self, folder: Path) -> bool:
        """Whether the run goes on, and has its states in ``folder``."""
        return not self._is_over and self._folder.absolute() == folder.absolute()

    def end(self) -> None:
        """Ends the run, once, when nothing of it is under way any more. Removes its states if a checkpoint that it has
        saved or loaded is as new; else rank 0 tells where they are. Ranks need not end together."""
        if self._is_over:
            return
        self._is_over = True
        step = self._state.step
        if step is None or (self._saved_in is not None and last_step(self._saved_in) >= step):
            self._state.remove()
            return
        self._state.leave()
        if self._rank == 0:
            logger.warning(
                f"{self._folder} keeps the live state of step {step}, {self._state.bytes_here / 1e9:.3g} GB on this "
                f"node: load_checkpoint goes on from it, and ds_lgamp checkpoint publish {self._folder} "
                f"{self._directory or 'CHECKPOINTS'} makes it a checkpoint; if you need neither, remove the folder"
            )


def open_folder(folder: Path) -> None:
    """Makes the ``folder`` of live states. Collective over all ranks; raises ConfigError on every rank if one cannot
    write there, if another engine does, or if transformers' Trainer trains."""
    raise_everywhere(_complaint_about(folder), ConfigError)


def _complaint_about(folder: Path) -> str | None:
    """Returns why this rank cannot use ``folder``; None if it can."""
    if _trainer_is_there():
        return (
            f"{BLOCK}.live_checkpoint is {str(folder)!r}, but transformers' Trainer counts steps and data in its own "
            "checkpoints, and would repeat those of a live state; remove it, and set save_steps"
        )
    if any(live.uses(folder) for live in _alive):
        return (
            f"{BLOCK}.live_checkpoint is {str(folder)!r}, where another engine of the script has its states; name "
            "another folder, or destroy that engine first"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return None
    except OSError as error:
        trouble = f"which cannot be written ({error.strerror})"
        return f"{BLOCK}.live_checkpoint is {str(folder)!r}, {trouble}; name another folder"


def _trainer_is_there() -> bool:
    """Whether the script has made the arguments of a Trainer that uses DeepSpeed."""
    module = sys.modules.get("transformers.integrations.deepspeed")
    made = getattr(module, "_hf_deepspeed_config_weak_ref", None)
    return made is not None and isinstance(made(), getattr(module, "HfTrainerDeepSpeedConfig", ()))
