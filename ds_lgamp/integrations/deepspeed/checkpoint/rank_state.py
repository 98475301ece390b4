"""What one rank has of its own: random states, extra states of layers, client state and buffers; the live state that
has them beside the rank's units after each step; and what ``engine.optimizer.state_dict()`` returns, which the same
rank of the same layout loads.

A checkpoint has the first three as JSON text in a tensor of bytes, and names buffers as ``ds_lgamp.checkpoint.names``
says."""

import hashlib
import logging
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from ds_lgamp.checkpoint.files import CheckpointError, everywhere
from ds_lgamp.checkpoint.live_recovery import last_step, publish_newest
from ds_lgamp.checkpoint.live_state import BesideUnits, LiveState
from ds_lgamp.checkpoint.names import Copy, first_copies, name_of_first, name_of_own, names_to_write, rank_name
from ds_lgamp.checkpoint.ranges import FlatShard, with_own_kernels
from ds_lgamp.checkpoint.schema import decode_text
from ds_lgamp.checkpoint.values import encode
from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.cost.offload import slots_of
from ds_lgamp.integrations.deepspeed.checkpoint.description import Run, describe, encode_named, ranks_of, share_of
from ds_lgamp.integrations.deepspeed.model.module import PlacedModule, persistent_buffers, with_extra_state
from ds_lgamp.partition.agreement import everyone, raise_everywhere
from ds_lgamp.partition.memory import bytes_of, row_of, write
from ds_lgamp.partition.zero_partition import ZeroPartition
from ds_lgamp.runtime.recompute import RandomSource, read_states
from ds_lgamp.watch.this_rank import this_rank

logger = logging.getLogger(__name__)


def rank_state(run: Run, client_state: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns ``random``, ``extra_states`` and ``client_state`` of this rank, encoded. Raises CheckpointError if
    ``client_state`` holds what no checkpoint can."""
    sources = run.lgamp.random_sources
    random = {source.name: encode(state) for source, state in zip(sources, read_states(sources))}
    states = {name: part.get_extra_state() for name, part in with_extra_state(run.lgamp.placed)}
    return {
        "random": random,
        "extra_states": {name: encode_named(name, state) for name, state in states.items() if state is not None},
        "client_state": encode_named("client_state", dict(client_state)),
    }


def rank_state_to_read(run: Run, layout: Mapping[str, Any], sizes: Mapping[str, torch.Size]) -> dict[str, FlatShard]:
    """Returns memory for the text of this rank, by its name in the checkpoint, and after it, if layers have extra
    state, for those of all pipeline ranks there.

    Ranks beyond those of the checkpoint's ``layout`` take the text of a rank that had the same numbers modulo the
    numbers of ranks there. So ranks that drew the same numbers go on drawing the same.
    """
    pipeline_rank, data_rank, tensor_rank = ranks_of(run)
    name = rank_name(
        pipeline_rank % layout["pipeline_ranks"],
        data_rank % layout["data_ranks"],
        tensor_rank % layout["tensor_ranks"],
    )
    if name not in sizes:
        # One process wrote the checkpoint for all ranks.
        name = rank_name(0, 0, 0)
    names = [name]
    if any(with_extra_state(run.lgamp.placed)):
        others = (rank_name(rank, 0, 0) for rank in range(layout["pipeline_ranks"]))
        names += (other for other in others if other in sizes)
    return {
        name: FlatShard(sizes[name], 0, torch.empty(sizes[name], dtype=torch.uint8, device="cpu")) for name in names
    }


def decode_rank_state(folder: Path, text: Mapping[str, FlatShard]) -> dict[str, Any]:
    """Returns ``random``, states by generator, and ``client_state`` of this rank, and ``extra_states`` of all layers.
    Raises CheckpointError if a text holds something else."""
    own, *others = (decode_text(folder, name, shard.values) for name, shard in text.items())
    extra_states: dict[str, Any] = {}
    for each in (*others, own):
        extra_states |= each["extra_states"]
    return {**own, "extra_states": extra_states}


def write_extra_states(module: PlacedModule, states: Mapping[str, Any]) -> None:
    """Gives the layers of this rank their extra ``states``. One without a state stays as it is."""
    for name, part in with_extra_state(module):
        if name in states:
            part.set_extra_state(states[name])


def write_random_states(sources: Sequence[RandomSource], states: Mapping[str, Any]) -> None:
    """Sets the generators to ``states``. One without a state, as on another kind of device, stays as it is."""
    for source in sources:
        if source.name in states:
            source.write(states[source.name])


_KINDS_OF_RANKS = ("pipeline_ranks", "data_ranks", "tensor_ranks")


def buffers_to_write(run: Run) -> dict[str, FlatShard]:
    """Returns the buffers that this rank writes, by name in the checkpoint. Collective over all ranks, but digests
    travel only between ranks that may have the same buffer."""
    own = everywhere(partial(_copies, run))
    of_data_rank = first_copies(everyone(own, run.grid.get_model_parallel_group()))
    first = everyone({name: of_data_rank[name] for name in own}, run.grid.get_data_parallel_group())[0]
    names = names_to_write(own, first)
    return {
        names[name]: FlatShard(tensor.shape, 0, row_of(tensor.detach()))
        for name, tensor in persistent_buffers(run.lgamp.placed)
        if name in names
    }


def buffers_to_read(
    run: Run, here: Mapping[str, Any], there: Mapping[str, Any], sizes: Mapping[str, torch.Size]
) -> dict[str, FlatShard]:
    """Returns memory for the buffers of this rank, by name in the checkpoint: its own copy if the run has as many ranks
    of every kind as the checkpoint, else the first rank's.

    Args:
        here, there: the layouts of the run and of the checkpoint.
        sizes: the tensors in the checkpoint.
    """
    has_own = all(here[kind] == there[kind] for kind in _KINDS_OF_RANKS)
    buffers = {}
    for name, tensor in persistent_buffers(run.lgamp.placed):
        own = name_of_own(name, ranks_of(run))
        written = own if has_own and own in sizes else name_of_first(name)
        if written in sizes:
            values = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
            buffers[written] = FlatShard(tensor.shape, 0, values)
    return buffers


def commit_buffers(module: PlacedModule, read: Mapping[str, FlatShard]) -> None:
    """Copies what was ``read`` into the buffers of ``module``."""
    values = {key.split("/", 2)[2]: shard.values for key, shard in read.items()}
    for name, tensor in persistent_buffers(module):
        if name in values:
            write(tensor, values[name].view(tensor.shape))


def _copies(run: Run) -> dict[str, Copy]:
    return {name: Copy(ranks_of(run), _digest(tensor)) for name, tensor in persistent_buffers(run.lgamp.placed)}


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(bytes_of(tensor.detach().cpu()).numpy().tobytes()).hexdigest()


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


_STATE_KEYS = {"data_rank", "shard", "class", "partition", "optimizer"}
_ALIKE = {"DeepSpeedCPULion": "FusedLion"}
"""Classes that take over each other's state: the same rule on the host and on the device."""


def state_of(
    optimizer: torch.optim.Optimizer, partition: ZeroPartition, data_group: dist.ProcessGroup
) -> dict[str, Any]:
    """Returns a copy of this rank's master weights and optimizer state."""
    partition.catch_up()
    return {
        "data_rank": (data_group.rank(), data_group.size()),
        "shard": _shard_place(partition),
        "class": type(optimizer).__name__,
        "partition": _partition_state(partition),
        "optimizer": deepcopy(optimizer.state_dict()),
    }


def load_state(
    optimizer: torch.optim.Optimizer, partition: ZeroPartition, data_group: dist.ProcessGroup, state: dict[str, Any]
) -> None:
    """Loads what :func:`state_of` returned. Collective over all ranks. Raises CheckpointError on all of them, and
    changes nothing, if the state of one does not fit."""
    raise_everywhere(_complaint_about_state(optimizer, partition, data_group, state), CheckpointError)
    _load_partition_state(partition, state["partition"])
    # Copied, because torch would update the given tensors in place.
    saved, own = deepcopy(state["optimizer"]), optimizer.state_dict()["param_groups"]
    saved["param_groups"] = [with_own_kernels(*pair) for pair in zip(saved["param_groups"], own)]
    optimizer.load_state_dict(saved)


def names_of_cut(state: Any) -> set[str]:
    """Returns the parameters in ``state``, of :func:`state_of`, that count their steps by themselves."""
    if not isinstance(state, dict) or state.keys() != _STATE_KEYS:
        return set()
    cut = [unit for unit in state["partition"].values() if unit.get("is_cut")]
    return {name for unit in cut for name, *_ in unit["contents"]}


def _complaint_about_state(
    optimizer: torch.optim.Optimizer, partition: ZeroPartition, data_group: dist.ProcessGroup, state: Any
) -> str | None:
    """Returns why this rank cannot load ``state``; None if it can."""
    if not isinstance(state, dict) or state.keys() != _STATE_KEYS:
        return "the state is not from engine.optimizer.state_dict(); pass what it returned on this rank"
    rank, ranks = data_group.rank(), data_group.size()
    if tuple(state["data_rank"]) != (rank, ranks):
        written_rank, written_ranks = state["data_rank"]
        return (
            f"the state of engine.optimizer is from data-parallel rank {written_rank} of {written_ranks}, but "
            f"this is rank {rank} of {ranks}; load it on its own rank, or use save_checkpoint and load_checkpoint"
        )
    shard_place = _shard_place(partition)
    if state["shard"] != shard_place:
        return (
            f"the state of engine.optimizer has {state['shard']}, but this run has {shard_place}; use "
            "save_checkpoint and load_checkpoint"
        )
    complaint = complaint_about_class(state["class"], type(optimizer).__name__)
    if complaint is not None:
        return complaint
    sizes, written_sizes = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, state["optimizer"]["param_groups"])
    )
    if sizes != written_sizes:
        if any(unit.master.is_cut for unit in partition.units) and not names_of_cut(state):
            return (
                "the state of engine.optimizer is from a time before a parameter was frozen; use save_checkpoint and "
                "load_checkpoint"
            )
        return (
            f"the state of engine.optimizer has parameter groups of {written_sizes} shards, but this optimizer "
            f"of {sizes}; build model, groups and ds_config.json as they were"
        )
    complaint = _complaint_about_units(partition, state["partition"])
    if complaint is not None:
        return complaint
    for unit in partition.units:
        saved = state["partition"][unit.name]
        if (saved["master"].shape, "weights" in saved) != (unit.master.values.shape, unit.master.is_copy):
            return (
                f"the state of engine.optimizer holds {unit.name} for another zero_optimization.stage or data "
                "type; load it with the ds_config.json of the run that it comes from"
            )
    return None


def complaint_about_class(written: str | None, own: str) -> str | None:
    """Returns why optimizer state of the class ``written`` does not fit the class ``own``. Returns None if it does, or
    if ``written`` is None because the class is unknown."""
    if written is None or len({_ALIKE.get(name, name) for name in (written, own)}) == 1:
        return None
    return f"the optimizer state is from {written}, but this run has {own}; use {written}"


def _shard_place(partition: ZeroPartition) -> str:
    """Returns which of a unit's parts is this rank's shard, in words."""
    policies = {unit.policy for unit in partition.units if unit.trains}
    return ", ".join(sorted(f"shard {policy.shard_index} of {policy.shard_group.size()}" for policy in policies))


def _partition_state(partition: ZeroPartition) -> dict[str, dict[str, Any]]:
    """Returns the state of every unit by name: the contents of its storage in their order, this rank's master weights,
    and the weights if they are other tensors."""
    state = {}
    for unit in partition.units:
        # Cloned, because torch.save writes a view with its whole storage.
        state[unit.name] = {"contents": unit.storage.contents(), "master": unit.master.values.detach().clone()}
        if unit.master.is_cut:
            state[unit.name]["is_cut"] = True
        if unit.master.is_copy:
            state[unit.name]["weights"] = unit.storage.shard.detach().clone()
    return state


def _complaint_about_units(partition: ZeroPartition, state: dict[str, dict[str, Any]]) -> str | None:
    """Returns the first difference between the parameters of the units, or their order, and ``state``; None if there
    is none."""
    own = {unit.name: unit.storage.contents() for unit in partition.units}
    for name in sorted(own.keys() | state.keys()):
        here, there = own.get(name, []), state.get(name, {}).get("contents", [])
        if here != there:
            different = sorted({str(entry) for entry in here} ^ {str(entry) for entry in there})
            return (
                f"{name} has other parameters, shapes or optimizer groups than the state of engine.optimizer "
                f"({', '.join(different) or 'in another order'}); build model and groups as they were, or use "
                "save_checkpoint and load_checkpoint"
            )
    return None


def _load_partition_state(partition: ZeroPartition, state: dict[str, dict[str, Any]]) -> None:
    for unit in partition.units:
        saved = state[unit.name]
        unit.replace_shard(saved["master"], saved.get("weights"))
    partition.gather_stale()
