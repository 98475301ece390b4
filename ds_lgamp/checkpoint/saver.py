"""Writes and reads the checkpoints of all ranks together; writes while they train."""

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ds_lgamp.checkpoint import folder as folders
from ds_lgamp.checkpoint.errors import CheckpointError, everywhere, sentence_of
from ds_lgamp.checkpoint.shard import FlatShard, staged
from ds_lgamp.checkpoint.storage import ChecksummedWriter, ShardLoadPlanner, ShardSavePlanner, VerifyingReader
from ds_lgamp.partition.agreement import everyone

logger = logging.getLogger(__name__)
THREADS = "ds_lgamp checkpoint"
"""How the names of threads that write begin."""
REST = 9
"""How much longer than it is busy the thread rests: it takes a tenth of a core and of the memory's bandwidth."""
_savers: list["Saver"] = []
"""Those that are writing, in the order they began."""


def wait_for_all() -> None:
    """Until no save is under way. Collective over all ranks; raises CheckpointError on every rank if one failed."""
    failures = []
    while _savers:
        try:
            _savers[0].wait()
        except CheckpointError as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


class Saver:
    """One checkpoint at a time: the next waits for the last, and so does the end of the process.

    All ranks call its methods together.

    Args:
        asynchronous: whether :meth:`save` copies the state and returns while a thread writes it.
        keep_last: how many checkpoints stay in a directory; None keeps all.
    """

    def __init__(self, asynchronous: bool, keep_last: int | None) -> None:
        self._asynchronous, self._keep_last = asynchronous, keep_last
        self._own_group: dist.ProcessGroup | None = None
        self._awaited = threading.Event()
        """Set when somebody waits for the thread, as the end of the process does before it joins the pool's."""
        threading._register_atexit(self._awaited.set)  # type: ignore[attr-defined]
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix=THREADS)
        self._thread: int | None = None
        self._writing: Future[None] | None = None

    def save(
        self, directory: Path, tag: str, tensors: Mapping[str, FlatShard], state: dict[str, Any], publish_latest: bool
    ) -> None:
        """Writes the checkpoint ``directory/tag``, beside the one that has its name until it is whole.

        Args:
            tensors: by name, this rank's range of each; all ranks' together are every element once.
            state: what is no tensor, as JSON can hold it; the first rank's is written.

        Raises CheckpointError on every rank if the last save failed or the directory cannot be written; if this save
        fails later, the next call raises it.
        """
        # Of other savers, too: two saves in one directory would be in each other's way.
        wait_for_all()
        if self._asynchronous:
            given = tensors
            tensors = everywhere(lambda: staged(given))
        first = dist.get_rank() == 0
        make = partial(folders.new_tensors, directory / tag)
        try:
            destination = everyone(everywhere(make if first else _nothing))[0]
        except CheckpointError as error:
            raise _failure(directory / tag, "could not be saved", error) from None
        publish = partial(folders.publish, directory / tag, destination, state)
        follow = partial(self._follow, directory, tag, publish_latest)
        write = partial(self._write, self._group(), destination, tensors, publish, follow)
        if self._asynchronous:
            self._awaited.clear()
            self._writing = self._threads.submit(write)
            _savers.append(self)
        else:
            write()

    def wait(self) -> None:
        """Until the last save is over. Raises CheckpointError on every rank if it failed."""
        # What the thread collects as garbage may wait for the thread: an engine waits when it is destroyed.
        if self._writing is not None and threading.get_ident() != self._thread:
            writing, self._writing = self._writing, None
            _savers.remove(self)
            self._awaited.set()
            writing.result()

    def load(self, reader: VerifyingReader, targets: Mapping[str, FlatShard]) -> None:
        """Fills this rank's ranges of the tensors of a checkpoint. Raises CheckpointError on every rank if one cannot
        read what it needs; the targets may then be half filled."""
        loading = partial(dcp.load, dict(targets), storage_reader=reader, planner=ShardLoadPlanner())
        everywhere(lambda: loading(process_group=self._group()))

    def _group(self) -> dist.ProcessGroup:
        """All ranks; of its own, because a thread uses it while they train. Those that are done wait for the slowest
        disk, and notice at once when a rank is gone."""
        if self._own_group is None:
            self._own_group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        return self._own_group

    def _write(
        self,
        group: dist.ProcessGroup,
        destination: Path,
        tensors: Mapping[str, FlatShard],
        publish: Callable[[], None],
        follow: Callable[[], None],
    ) -> None:
        """In the thread, if there is one; ``publish`` and then ``follow`` are called on the first rank when all have
        written."""
        self._thread = threading.get_ident() if self._asynchronous else None
        first = dist.get_rank(group) == 0

        def write() -> None:
            writer = ChecksummedWriter(destination, publish, self._rest if self._asynchronous else None)
            dcp.save(dict(tensors), storage_writer=writer, planner=ShardSavePlanner(), process_group=group)

        steps = {
            "could not be saved": write,
            f"is saved, but {folders.LATEST} or older checkpoints could not be changed": lambda: everywhere(
                follow if first else _nothing, group
            ),
        }
        for complaint, step in steps.items():
            try:
                step()
            # DCP tells all ranks of what fails on one. What is no CheckpointException is that they cannot talk.
            except (Exception, CheckpointException) as error:
                if first:
                    folders.discard(destination)
                failure = _failure(destination.parent, complaint, error)
                if first:
                    logger.error(str(failure))
                raise failure from None

    def _rest(self, seconds: float) -> None:
        """After the thread was busy for so long: leaves cores and memory to the training, unless that waits."""
        self._awaited.wait(seconds * REST)

    def _follow(self, directory: Path, tag: str, publish_latest: bool) -> None:
        """What a published checkpoint changes beside it."""
        if publish_latest:
            folders.write_latest(directory, tag)
        if self._keep_last is not None:
            folders.keep_last(directory, tag, self._keep_last)


def _nothing() -> None:
    """What the other ranks do while the first acts."""


def _failure(folder: Path, complaint: str, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{folder} {complaint} ({sentence_of(error, dist.get_rank())}); checkpoints that are there are whole: mend "
        "that and save again"
    )
