"""Finds the live states that runs have left, and makes checkpoints of them."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ds_lgamp.checkpoint import folder as folders
from ds_lgamp.checkpoint.files import CheckpointError, DamageError, everywhere
from ds_lgamp.checkpoint.live_slot import RUN, Header, is_written, read_blobs, read_header
from ds_lgamp.checkpoint.names import BUFFERS, Copy, Share, add_share, first_copies, merge, names_to_write, rank_name
from ds_lgamp.checkpoint.ranges import FlatShard, Ranges, ShardGroup
from ds_lgamp.checkpoint.saver import Saver
from ds_lgamp.checkpoint.schema import text_of
from ds_lgamp.checkpoint.whole import write_alone
from ds_lgamp.partition.agreement import everyone

logger = logging.getLogger(__name__)
_PATIENCE = 10.0
"""Seconds for processes that were killed to be gone."""
_BUFFER = f"{BUFFERS}/"
"""How the names of buffers in a slot begin."""


class FoundSlot(NamedTuple):
    """A slot that a process sees."""

    path: str
    process: int
    run: str
    step: int
    rank: int
    ranks: int
    written: float
    directory: str | None


class FoundState(NamedTuple):
    """The slots of one state."""

    slots: Sequence[FoundSlot]

    @property
    def step(self) -> int:
        return self.slots[0].step

    @property
    def tag(self) -> str:
        """The name of the checkpoint that it becomes."""
        return f"global_step{self.step}"

    @property
    def is_whole(self) -> bool:
        return {slot.rank for slot in self.slots} == set(range(self.slots[0].ranks))

    @property
    def written(self) -> float:
        """When the last slot was written, in seconds since 1970."""
        return max(slot.written for slot in self.slots)

    def read_by(self, process: int, processes: int) -> list[FoundSlot]:
        """Returns the slots that ``process`` reads. Each rank's is read by one process that sees it."""
        seen: dict[int, dict[int, FoundSlot]] = {}
        for slot in self.slots:
            seen.setdefault(slot.rank, {})[slot.process] = slot
        readers = {rank: rank % processes if rank % processes in by else min(by) for rank, by in seen.items()}
        return [seen[rank][process] for rank, reader in readers.items() if reader == process]


def publish_newest(folder: Path, directory: Path, run: str) -> None:
    """Makes the newest whole live state in ``folder`` a checkpoint in ``directory``, unless that has one as new. Leaves
    out the states of ``run`` and of runs that go on. Collective over all ranks, each of which looks at the folder on
    its node; the first one says where ``directory`` is. Raises CheckpointError on all if the checkpoint cannot be
    written.

    It removes no other checkpoint there: the earlier run may have loaded them without saving any itself.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = everywhere(partial(_slots_in, folder, rank, run))
    published, where = everyone(everywhere(lambda: (_published(directory), str(directory.resolve()))))[0]
    for state in _whole_states(slot for seen in everyone(list(own)) for slot in seen):
        if state.step <= published:
            return
        its_directory = state.slots[0].directory
        if its_directory not in (None, where):
            _warn(f"{folder} has the live state of step {state.step} of a run with checkpoints in {its_directory}")
            continue
        read = state.read_by(rank, ranks)
        try:
            numbers = everywhere(partial(_read, {slot: own[slot] for slot in read}))
        except DamageError as error:
            _warn(f"{error}: looking for an older state now")
            continue
        headers = {slot.rank: header for each in everyone({s: own[s] for s in read}) for slot, header in each.items()}
        tensors, whole = _tensors(numbers, headers), _state(headers)
        _warn(f"{directory} goes on from the live state of step {state.step} in {folder}")
        try:
            Saver(asynchronous=False, keep_last=None).save(directory, state.tag, tensors, whole, publish_latest=True)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; the live state is in {folder}, and ds_lgamp checkpoint publish {folder} writes it elsewhere"
            ) from None
        return


def publish_alone(folder: Path, place: Callable[[str], Path]) -> Path:
    """Makes the newest whole live state in ``folder`` a checkpoint, in this process, at the ``place`` of its tag.
    Returns the checkpoint's folder. Raises CheckpointError if there is none, or if all are damaged."""
    own = _slots_in(folder, 0)
    damage: CheckpointError | None = None
    for state in _whole_states(own):
        try:
            numbers = _read({slot: own[slot] for slot in state.slots})
        except DamageError as error:
            logger.warning(f"{error}: looking for an older state now")
            damage = damage or error
            continue
        headers = {slot.rank: own[slot] for slot in state.slots}
        target = place(state.tag)
        write_alone(target, _tensors(numbers, headers), _state(headers))
        return target
    if damage is None and any(map(is_written, folder.glob(f"{RUN}*"))):
        raise CheckpointError(f"{folder} has live states of a job that runs; end it first")
    raise damage or CheckpointError(
        f"{folder} has no whole live state; name a live_checkpoint with the files of all ranks"
    )


def _slots_in(folder: Path, process: int, run: str | None = None) -> dict[FoundSlot, Header]:
    """Returns the slots of ``folder`` that have a header, without those of ``run``. Warns of damaged headers, and of
    runs that go on: their slots would change while somebody reads them."""
    found = {}
    for own in sorted(folder.glob(f"{RUN}*")):
        if own.name == f"{RUN}{run}":
            continue
        if _goes_on(own):
            logger.warning(f"{own} belongs to a job that runs, and is left alone")
            continue
        for path in sorted(own.glob("*.json")):
            try:
                header = read_header(path)
            except CheckpointError as error:
                logger.warning(str(error))
                continue
            about = header.run, header.step, header.rank, header.ranks, header.written, header.directory
            found[FoundSlot(str(path), process, *about)] = header
    return found


def _goes_on(own: Path) -> bool:
    """Whether processes hold the states in the folder of a run, and do not end soon."""
    end = time.monotonic() + _PATIENCE
    while is_written(own):
        if time.monotonic() > end:
            return True
        time.sleep(_PATIENCE / 100)
    return False


def _whole_states(slots: Iterable[FoundSlot]) -> Iterator[FoundState]:
    """Returns the whole states, from the newest on."""
    states: dict[tuple[str, int], list[FoundSlot]] = {}
    for slot in slots:
        states.setdefault((slot.run, slot.step), []).append(slot)
    whole = (state for state in map(FoundState, states.values()) if state.is_whole)
    return iter(sorted(whole, key=lambda state: state.written, reverse=True))


def last_step(directory: Path) -> int:
    """Returns the step of the last checkpoint in ``directory``; -1 if there is none that can be read. Only newer live
    states become checkpoints there."""
    try:
        last = folders.read_latest(directory)
        return -1 if last is None else folders.read_state(directory / last)["counters"]["global_steps"]
    except CheckpointError:
        return -1


def _published(directory: Path) -> float:
    """Returns what :func:`last_step` does; infinity if stock DeepSpeed wrote the last checkpoint, because then it is
    unknown whether a live state is newer."""
    try:
        last = folders.read_latest(directory)
    except CheckpointError:
        return -1
    return float("inf") if last is not None and folders.is_stock(directory / last) else last_step(directory)


def _read(slots: Mapping[FoundSlot, Header]) -> dict[int, dict[str, list[FlatShard]]]:
    """Returns the numbers in ``slots``, by rank and name. Raises DamageError if one is damaged."""
    return {slot.rank: read_blobs(Path(slot.path), header) for slot, header in slots.items()}


def _tensors(numbers: Mapping[int, Mapping[str, list[FlatShard]]], headers: Mapping[int, Header]) -> dict[str, Ranges]:
    """Returns what a checkpoint has of the ``numbers`` of some ranks, by its names there. ``headers`` has all ranks."""
    names = _buffer_names(headers)
    found: dict[str, list[FlatShard]] = {}
    for rank, shards in numbers.items():
        for name, own in shards.items():
            key = names[rank].get(name.removeprefix(_BUFFER)) if name.startswith(_BUFFER) else name
            if key is not None:
                found.setdefault(key, []).extend(own)
        found[rank_name(*headers[rank].places)] = [text_of(headers[rank].rank_state)]
    return {name: shards[0] if len(shards) == 1 else ShardGroup(shards) for name, shards in found.items()}


def _buffer_names(headers: Mapping[int, Header]) -> dict[int, dict[str, str]]:
    """Returns how a checkpoint names the buffers that it has of each rank, by the names of the buffers."""
    ranks = sorted(headers, key=lambda rank: (headers[rank].places[1], headers[rank].places))
    copies = {rank: _copies(headers[rank]) for rank in ranks}
    first = first_copies(copies.values())
    return {rank: names_to_write(own, first) for rank, own in copies.items()}


def _copies(header: Header) -> dict[str, Copy]:
    held = ((held.name, Copy(tuple(header.places), blob.checksum)) for blob in header.blobs for held in blob.held)
    return {name.removeprefix(_BUFFER): copy for name, copy in held if name.startswith(_BUFFER)}


def _state(headers: Mapping[int, Header]) -> dict[str, Any]:
    """Returns the content of state.json, from the headers of all ranks."""
    shares = (
        Share(
            header.parameters,
            {int(group): values for group, values in header.scalars.items()},
            set(header.extra_states),
            header.of_parameters,
        )
        for _, header in sorted(headers.items())
    )
    state = dict(headers[0].state)
    add_share(state, merge(shares))
    return state


def _warn(sentence: str) -> None:
    if dist.get_rank() == 0:
        logger.warning(sentence)
