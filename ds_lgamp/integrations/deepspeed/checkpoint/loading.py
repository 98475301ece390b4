"""Resumes a training run from a checkpoint, at the same layout or another."""

from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.utils.logging import logger

from ds_lgamp.checkpoint import folder as folders
from ds_lgamp.checkpoint.errors import CheckpointError, DamageError, everywhere
from ds_lgamp.checkpoint.shard import FlatShard
from ds_lgamp.checkpoint.storage import VerifyingReader
from ds_lgamp.checkpoint.units import Loading
from ds_lgamp.checkpoint.values import decode
from ds_lgamp.integrations.deepspeed.checkpoint.buffers import buffers_to_read, commit_buffers
from ds_lgamp.integrations.deepspeed.checkpoint.data_position import seek_data
from ds_lgamp.integrations.deepspeed.checkpoint.description import (
    describe_layout,
    describe_parameters,
    scheduler_state,
)
from ds_lgamp.integrations.deepspeed.checkpoint.fields import COUNTERS, PULLED, TOP_LEVEL, write_fields
from ds_lgamp.integrations.deepspeed.checkpoint.fitting import Parts, check_fit
from ds_lgamp.integrations.deepspeed.checkpoint.rank_state import (
    decode_rank_state,
    rank_state_to_read,
    write_extra_states,
    write_random_states,
)
from ds_lgamp.integrations.deepspeed.checkpoint.run import Run
from ds_lgamp.integrations.deepspeed.config.precision import load_scaler_state
from ds_lgamp.integrations.deepspeed.model.module import over_pipeline
from ds_lgamp.partition.agreement import Term, everyone, refuse_differing_terms


def find_checkpoints(directory: Path, tag: Any) -> list[Path]:
    """Returns the folder of the checkpoint ``tag``; if that is None, the last one's and then those of others, from the
    newest on. There are none, with a warning, where no checkpoint is the last. Collective over all ranks: the first one
    looks."""
    if tag is not None:
        return [directory / str(tag)]
    first = dist.get_rank() == 0
    found = everyone(everywhere(partial(_last_and_others, directory) if first else list))[0]
    if not found:
        hint = everyone(everywhere(partial(_hint, directory) if first else str))[0]
        logger.warning(f"{directory} has no file '{folders.LATEST}'; {hint}")
    return found


def _hint(directory: Path) -> str:
    if (directory / folders.STATE).is_file():
        own = directory.absolute()
        return f"it is a checkpoint itself: name {own.parent}, and pass the tag '{own.name}'"
    whole, begun = folders.newest_first(directory, "any"), folders.unfinished(directory)
    if whole:
        return f"pass the tag '{whole[0].name}', which is whole"
    if begun:
        return f"the save in {', '.join(begun)} was not finished; remove {directory}, and go on from one that was"
    return "pass a tag, or save a checkpoint first"


def _last_and_others(directory: Path) -> list[Path]:
    last = folders.read_latest(directory)
    return [] if last is None else list(dict.fromkeys([directory / last, *folders.newest_first(directory, last)]))


def load_first_whole(run: Run, directory: Path, candidates: list[Path], parts: Parts) -> tuple[Path, dict[str, Any]]:
    """Does :func:`load` with the first of ``candidates`` whose files are whole, and returns it too. If none is, raises
    the error of the first.

    A run that goes on from another than the first lets ``latest`` in ``directory`` name it: of the run's live states,
    those count that are newer than that.
    """
    first: DamageError | None = None
    for folder in candidates:
        try:
            client_state = load(run, folder, parts)
            if first is not None and parts.progress and dist.get_rank() == 0:
                _rename_latest(directory, candidates[0], folder)
            return folder, client_state
        except DamageError as error:
            first = first or error
            if folder != candidates[-1] and dist.get_rank() == 0:
                logger.warning(f"{error}: looking for an older one now")
    assert first is not None, "there is a candidate"
    raise first


def _rename_latest(directory: Path, damaged: Path, loaded: Path) -> None:
    """Lets ``latest`` name what was ``loaded`` in place of what is ``damaged``, if nobody has saved meanwhile."""
    with suppress(OSError):
        if directory / (folders.read_latest(directory) or "") == damaged:
            folders.write_latest(directory, str(loaded.relative_to(directory)))


def load(run: Run, folder: Path, parts: Parts) -> dict[str, Any]:
    """Loads ``parts`` of the checkpoint ``folder`` and returns its client state. Collective over all ranks; raises
    CheckpointError on all, and changes nothing, if the checkpoint does not fit or is damaged."""
    state, reader = everywhere(partial(_open, folder))
    loaded = Term(f"{folder.name} with checksum {state['index_checksum']}", "load the same one on every rank")
    refuse_differing_terms({"the checkpoint": loaded}, CheckpointError)
    run.optimizer.partition.catch_up()
    sizes = {name: entry.size for name, entry in reader.tensors.items()}
    dtypes = {name: entry.properties.dtype for name, entry in reader.tensors.items()}
    parameters = everywhere(partial(describe_parameters, run))
    own = {name: info for rank in over_pipeline(run.placed, parameters) for name, info in rank.items()}

    of_parameters = (state["optimizer"] or {}).get("of_parameters", {})

    def memory() -> tuple[Loading, dict[str, FlatShard], dict[str, FlatShard]]:
        check_fit(run, folder, state, parts, own, sizes)
        loading = Loading(run.optimizer.partition, dtypes)
        loading.add_weights()
        if parts.optimizer:
            run.optimizer.cut(of_parameters)
            loading.add_optimizer()
        buffers = buffers_to_read(run, describe_layout(run), state["layout"], sizes)
        return loading, buffers, rank_state_to_read(run, state["layout"], sizes)

    loading, buffers, text = everywhere(memory)
    run.saver.load(reader, {**loading.targets, **buffers, **text})
    mine = everywhere(partial(decode_rank_state, folder, text))
    if parts.scheduler and run.lr_scheduler is not None:
        _load_scheduler(folder, run.lr_scheduler, decode(state["lr_scheduler"]["state"]))

    def commit() -> None:
        loading.commit_weights()
        commit_buffers(run.placed, buffers)
        write_extra_states(run.placed, mine["extra_states"])
        if parts.optimizer:
            written = state["optimizer"]
            groups = decode(written["groups"])
            loading.commit_optimizer(run.optimizer.optimizer, groups, written["scalars"], of_parameters)
            load_scaler_state(run.optimizer.loss_scaler, state["loss_scaler"])
            run.optimizer.is_half_updated = False
        run.optimizer.late_overflow = parts.progress and state.get("late_overflow", False)
        if parts.progress:
            _resume(run, state, mine["random"])

    everywhere(commit)
    run.optimizer.partition.gather_stale()
    return mine["client_state"]


def _open(folder: Path) -> tuple[dict[str, Any], VerifyingReader]:
    state = folders.read_state(folder)
    return state, folders.reader(folder, state)


def _load_scheduler(folder: Path, scheduler: Any, state: dict[str, Any]) -> None:
    """Loads the ``state`` of the scheduler. Only the scheduler can tell that a state does not fit, half-way: then all
    ranks restore it and raise CheckpointError."""
    before = deepcopy(scheduler_state(scheduler))
    try:
        everywhere(partial(scheduler.load_state_dict, state))
    except CheckpointError as error:
        scheduler.load_state_dict(before)
        raise CheckpointError(
            f"{folder} has the state of another {type(scheduler).__name__} ({error}); build it as it was, or pass "
            "load_lr_scheduler_states=False"
        ) from None


def _resume(run: Run, state: dict[str, Any], random: dict[str, Any]) -> None:
    """Restores the counters, the position in the engine's own data, and the random states."""
    write_fields(run, COUNTERS, state["counters"])
    write_fields(run, TOP_LEVEL, state)
    seek_data(run, state["counters"][PULLED], state["data"])
    write_random_states(run.random_sources, random)
