"""The engine's methods for checkpoints: a run saves, and one of any layout goes on from there. Those that DeepSpeed has
too keep their signatures."""

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.utils.logging import logger

from ds_lgamp.checkpoint import folder as folders
from ds_lgamp.checkpoint.files import CheckpointError, DamageError, everywhere, on_first_rank
from ds_lgamp.checkpoint.names import Share, add_share, merge, name_of_first, parameter_name, rank_name
from ds_lgamp.checkpoint.ranges import FlatShard, Loading, optimizer_tensors, scalars_of, weights
from ds_lgamp.checkpoint.saver import wait_for_all
from ds_lgamp.checkpoint.schema import COUNTERS, PULLED, text_of
from ds_lgamp.checkpoint.values import decode
from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.deepspeed.checkpoint.description import (
    Parts,
    Run,
    check_fit,
    describe,
    describe_layout,
    describe_parameters,
    ranks_of,
    scheduler_state,
    seek_data,
    share_of,
)
from ds_lgamp.integrations.deepspeed.checkpoint.fp32_weights import put_script
from ds_lgamp.integrations.deepspeed.checkpoint.rank_state import (
    buffers_to_read,
    buffers_to_write,
    commit_buffers,
    decode_rank_state,
    rank_state,
    rank_state_to_read,
    write_extra_states,
    write_random_states,
)
from ds_lgamp.integrations.deepspeed.checkpoint.stock_files import has_layer_files, read_client_state, read_layers
from ds_lgamp.integrations.deepspeed.config.precision import load_scaler_state
from ds_lgamp.integrations.deepspeed.model.experts import divided
from ds_lgamp.integrations.deepspeed.model.module import over_data, over_pipeline, persistent_buffers
from ds_lgamp.partition.agreement import Term, anyone, everyone, refuse_differing_terms


def save_checkpoint(
    engine: Run,
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
    engine.lgamp.settle_nonfinite()
    if engine.lgamp.live is not None:
        engine.lgamp.live.saves_in(Path(save_dir))
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    save(
        engine,
        Path(save_dir),
        tag,
        {} if client_state is None else client_state,
        save_latest,
        exclude_frozen_parameters,
    )
    on_first_rank(partial(put_script, Path(save_dir)))
    return True


def load_checkpoint(
    engine: Run,
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
    engine.lgamp.tensor_access.refuse_inside_block("load_checkpoint")
    wait_for_all()
    # A checkpoint has optimizer state of what the script unfreezes before its next batch.
    if anyone(bool(engine.lgamp.partition.thawed())):
        engine.lgamp.thaw()
    live = None if load_module_only else engine.lgamp.live
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
    if engine.lgamp.check is not None:
        engine.lgamp.check.forget()
    if engine.lgamp.live is not None:
        engine.lgamp.live.forget()
    return str(folder), client_state


def wait_for_checkpoint(engine: Run) -> None:
    """Waits until the last save is on the disk. Collective; raises CheckpointError on every rank if it failed."""
    engine.lgamp.saver.wait()


def save(
    run: Run, directory: Path, tag: str, client_state: Any, publish_latest: bool, exclude_frozen: bool = False
) -> None:
    """Writes the run as ``directory/tag``. Collective over all ranks; raises CheckpointError on all.

    Args:
        client_state: a dictionary of the user's; every rank saves its own.
        publish_latest: whether ``directory/latest`` names the checkpoint afterwards.
        exclude_frozen: whether to leave out parameters that do not train.
    """

    def collect() -> tuple[dict[str, FlatShard], dict[str, Any], Share]:
        folders.check_tag(tag)
        if not isinstance(client_state, Mapping):
            raise CheckpointError(f"client_state is a {type(client_state).__name__}; pass a dictionary that holds it")
        if run.optimizer.is_half_updated:
            raise CheckpointError(
                "the last batch failed after some chunks had been updated, so weights of two steps would be saved; "
                "go on from the last checkpoint"
            )
        partition, optimizer = run.optimizer.partition, run.optimizer.optimizer
        partition.attach_parameters()
        partition.catch_up()
        tensors = {**weights(partition, exclude_frozen), **optimizer_tensors(partition, optimizer)}
        tensors[rank_name(*ranks_of(run))] = text_of(rank_state(run, client_state))
        state = {**describe(run), "late_overflow": run.optimizer.late_overflow}
        scalars = scalars_of((segment, optimizer.state.get(segment.shard, {})) for segment in partition.segments())
        return tensors, state, share_of(run, exclude_frozen)._replace(**scalars._asdict())

    tensors, state, own = everywhere(collect)
    tensors |= buffers_to_write(run)
    # Each step passes on what the ranks of the step before have, so after the last one every rank has everything.
    for group in (
        run.grid.get_data_parallel_group(),
        run.grid.get_slice_parallel_group(),
        run.grid.get_pipe_parallel_group(),
    ):
        own = merge(everyone(own, group))
    add_share(state, own)
    run.lgamp.saver.save(directory, tag, tensors, state, publish_latest)


def find_checkpoints(directory: Path, tag: Any) -> list[Path]:
    """Returns the folder of the checkpoint ``tag``; if that is None, the last one's and then those of others, from the
    newest on. There are none, with a warning, where no checkpoint is the last. Collective over all ranks: the first one
    looks."""
    if tag is not None:
        return [directory / str(tag)]
    found: list[Path] = on_first_rank(partial(folders.last_and_others, directory))
    if not found:
        advice = on_first_rank(partial(folders.advice_without_latest, directory))
        logger.warning(f"{directory} has no file '{folders.LATEST}'; {advice}")
    return found


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
                folders.rename_latest(directory, candidates[0], folder)
            return folder, client_state
        except DamageError as error:
            first = first or error
            if folder != candidates[-1] and dist.get_rank() == 0:
                logger.warning(f"{error}: looking for an older one now")
    assert first is not None, "there is a candidate"
    raise first


def load(run: Run, folder: Path, parts: Parts) -> dict[str, Any]:
    """Loads ``parts`` of the checkpoint ``folder`` and returns its client state. Collective over all ranks; raises
    CheckpointError on all, and changes nothing, if the checkpoint does not fit or is damaged."""
    if not parts.progress and on_first_rank(partial(has_layer_files, folder)):
        return load_layer_files(run, folder, parts)
    state, reader = everywhere(partial(folders.open_checkpoint, folder))
    loaded = Term(f"{folder.name} with checksum {state['index_checksum']}", "load the same one on every rank")
    refuse_differing_terms({"the checkpoint": loaded}, CheckpointError)
    run.optimizer.partition.catch_up()
    sizes = {name: entry.size for name, entry in reader.tensors.items()}
    dtypes = {name: entry.properties.dtype for name, entry in reader.tensors.items()}
    parameters = everywhere(partial(describe_parameters, run))
    module = run.lgamp.placed
    if divided(module):
        parameters = {name: info for rank in over_data(module, parameters) for name, info in rank.items()}
    own = {name: info for rank in over_pipeline(module, parameters) for name, info in rank.items()}

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
    run.lgamp.saver.load(reader, {**loading.targets, **buffers, **text})
    mine = everywhere(partial(decode_rank_state, folder, text))
    if parts.scheduler and run.lr_scheduler is not None:
        _load_scheduler(folder, run.lr_scheduler, decode(state["lr_scheduler"]["state"]))

    def commit() -> None:
        loading.commit_weights()
        commit_buffers(run.lgamp.placed, buffers)
        write_extra_states(run.lgamp.placed, mine["extra_states"])
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


def load_layer_files(run: Run, folder: Path, parts: Parts) -> dict[str, Any]:
    """Loads the weights and buffers of this rank's layers from stock DeepSpeed's layer files in ``folder``, as stock
    does with ``load_module_only=True``. Returns their client state. Collective over all ranks; raises CheckpointError
    on all, and changes nothing, if a file is missing or of another model."""
    refuse_differing_terms({"the checkpoint": Term(folder.name, "load the same one on every rank")}, CheckpointError)
    module, partition = run.lgamp.placed, run.optimizer.partition
    partition.catch_up()

    def read() -> tuple[dict[str, Any], Loading, dict[str, FlatShard]]:
        client_state, found = read_client_state(folder), read_layers(folder, module)
        own = [name for name, _ in persistent_buffers(module) if name in found]
        tensors = {name_of_first(name): found.pop(name) for name in own}
        written = {"parameters": {name: {"shape": list(tensor.shape)} for name, tensor in found.items()}}
        sizes = {name: tensor.shape for name, tensor in tensors.items()}
        check_fit(run, folder, written, parts, describe_parameters(run), sizes)
        loading = Loading(partition, {parameter_name(name): tensor.dtype for name, tensor in found.items()})
        loading.add_weights()
        for name, tensor in found.items():
            shard = loading.targets.get(parameter_name(name))
            if shard is not None:
                shard.values.copy_(tensor.flatten()[shard.start : shard.start + shard.values.numel()])
        return client_state, loading, {name: FlatShard(each.shape, 0, each.flatten()) for name, each in tensors.items()}

    client_state, loading, buffers = everywhere(read)

    def commit() -> None:
        loading.commit_weights()
        commit_buffers(module, buffers)
        run.optimizer.late_overflow = False

    everywhere(commit)
    partition.gather_stale()
    return client_state


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
    for name in COUNTERS:
        setattr(run, name, state["counters"][name])
    run.lgamp.placed.micro_offset = state["micro_offset"]
    seek_data(run, state["counters"][PULLED], state["data"])
    write_random_states(run.lgamp.random_sources, random)
