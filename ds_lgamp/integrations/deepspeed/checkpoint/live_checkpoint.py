"""The live state of a training run: what it holds of each step, and how the next run continues from it."""

import logging
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from ds_lgamp.checkpoint.live_recovery import last_step, publish_newest
from ds_lgamp.checkpoint.live_state import BesideUnits, LiveState
from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.cost.offload import slots_of
from ds_lgamp.integrations.deepspeed.checkpoint.description import Run, describe, ranks_of, share_of
from ds_lgamp.integrations.deepspeed.checkpoint.rank_state import rank_state
from ds_lgamp.integrations.deepspeed.model.module import persistent_buffers
from ds_lgamp.partition.agreement import everyone, raise_everywhere
from ds_lgamp.watch.this_rank import this_rank

logger = logging.getLogger(__name__)


class LiveCheckpoint(LiveState):
    """The live state of an engine. Ranks build it together.

    Args:
        engine: with all its parameters.
        folder: of the live states.
    """

    def __init__(self, engine: Run, folder: Path) -> None:
        header = {
            "run": everyone(uuid4().hex[:8])[0],
            "rank": dist.get_rank(),
            "ranks": dist.get_world_size(),
            "places": list(ranks_of(engine)),
        }
        optimizer, slots = engine.optimizer, slots_of(engine.lgamp.program_spec.updates)
        units, own = optimizer.partition.units, share_of(engine)
        super().__init__(folder, header, units, optimizer.optimizer, engine.device, slots, own)
        self._directory: str | None = None
        """Where the run saves and loads checkpoints; None if it has not yet."""
        self._saved_in: Path | None = None
        """Where it has saved one; None if it has not yet."""
        self._is_over = False
        this_rank.live_checkpoints.add(self)

    def end_step(self, engine: Run, client_state: dict[Any, Any]) -> None:
        """Called at the end of a step, after which only updates that it has postponed change its state."""
        with torch.no_grad():
            buffers = {
                name: tensor.clone() for name, tensor in persistent_buffers(engine.lgamp.placed) if tensor.numel()
            }
        state, own = describe(engine), rank_state(engine, client_state)
        self.complete(BesideUnits(engine.global_steps, self._directory, state, own, buffers))

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
        publish_newest(self.folder, directory, self.header["run"])

    def uses(self, folder: Path) -> bool:
        """Whether the run goes on, and has its states in ``folder``."""
        return not self._is_over and self.folder.absolute() == folder.absolute()

    def end(self) -> None:
        """Ends the run, once, when nothing of it is under way any more. Removes its states if a checkpoint that it has
        saved or loaded is as new; else rank 0 tells where they are. Ranks need not end together."""
        if self._is_over:
            return
        self._is_over = True
        if self.step is None or (self._saved_in is not None and last_step(self._saved_in) >= self.step):
            self.remove()
            return
        self.leave()
        if self.header["rank"] == 0:
            logger.warning(
                f"{self.folder} keeps the live state of step {self.step}, {self.bytes_here / 1e9:.3g} GB on this "
                f"node: load_checkpoint goes on from it, and ds_lgamp checkpoint publish {self.folder} "
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
    if any(live.uses(folder) for live in this_rank.live_checkpoints):
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
