"""Writes and reads checkpoints on all ranks together, and can write while they train."""

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ds_lgamp.checkpoint import folder as folders
from ds_lgamp.checkpoint.files import CheckpointError, everywhere, on_first_rank, sentence_of
from ds_lgamp.checkpoint.ranges import FlatShard, Ranges, host_copies
from ds_lgamp.checkpoint.storage import ChecksummedWriter, ShardLoadPlanner, ShardSavePlanner, VerifyingReader
from ds_lgamp.watch.this_rank import this_rank

logger = logging.getLogger(__name__)
THREADS = "ds_lgamp checkpoint"
"""Prefix of the names of writing threads."""
REST = 9
"""Rest time per busy time of the writing thread. It then uses a tenth of a core and of the memory bandwidth."""
_LOOK = 1.0
"""Seconds after which a thread that rests looks whether a rank fails."""
_PATIENCE = 60.0
"""Seconds to wait for a disk before saying so."""


def wait_for_all() -> None:
    """Waits until no save is in progress. Collective over all ranks. Raises CheckpointError on every rank if a save
    failed."""
    failures = []
    while this_rank.savers:
        try:
            this_rank.savers[0].wait()
        except CheckpointError as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


class Saver:
    """Saves one checkpoint at a time. The next save waits for the last, and so does process exit.

    All ranks call its methods together.

    Args:
        asynchronous: whether :meth:`save` copies the state and returns while a thread writes it.
        keep_last: how many checkpoints to keep in a directory; None keeps all.
    """

    def __init__(self, asynchronous: bool, keep_last: int | None) -> None:
        self._asynchronous, self._keep_last = asynchronous, keep_last
        self._own_group: dist.ProcessGroup | None = None
        self._awaited = threading.Event()
        """Set when somebody waits for the thread. Process exit sets it before it joins the pool's threads."""
        threading._register_atexit(self._awaited.set)  # type: ignore[attr-defined]
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix=THREADS)
        self._thread: int | None = None
        self._writing: Future[None] | None = None

    def save(
        self, directory: Path, tag: str, tensors: Mapping[str, Ranges], state: dict[str, Any], publish_latest: bool
    ) -> None:
        """Writes the checkpoint ``directory/tag``. An older checkpoint with that tag stays until the new one is
        complete.

        Args:
            directory: folder of the checkpoints.
            tag: name of the checkpoint's folder in it.
            tensors: what this rank has of each tensor, by name. All ranks together must hold every element exactly
                once.
            state: everything but tensors, as JSON-compatible values. The first rank's state is written.
            publish_latest: whether to write the tag to the file ``latest``.

        Raises CheckpointError on every rank if the last save failed or the directory cannot be written. An error of the
        writing thread is raised by the next call.
        """
        # Waits for other savers too, because two saves in one directory would interfere.
        wait_for_all()
        # The script may change its working directory while the thread writes.
        directory = directory.absolute()
        if self._asynchronous:
            given = tensors
            tensors = everywhere(lambda: host_copies(given))
        try:
            destination = on_first_rank(partial(folders.new_tensors, directory / tag))
        except CheckpointError as error:
            raise _failure(directory / tag, "could not be saved", error) from None
        publish = partial(folders.publish, directory / tag, destination, state)
        follow = partial(self._follow, directory, tag, publish_latest)
        write = partial(self._write, self._group(), destination, tensors, publish, follow)
        if self._asynchronous:
            self._awaited.clear()
            self._writing = self._threads.submit(write)
            this_rank.savers.append(self)
        else:
            write()

    def wait(self) -> None:
        """Waits until the last save is complete. Raises CheckpointError on every rank if it failed."""
        # Garbage collection can run in the writing thread and destroy an engine, which waits for its saver. The thread
        # must not wait for itself.
        if self._writing is not None and threading.get_ident() != self._thread:
            writing, self._writing = self._writing, None
            this_rank.savers.remove(self)
            self._awaited.set()
            with this_rank.whereabouts.waiting_for("the save in the background"):
                writing.result()

    def load(self, reader: VerifyingReader, targets: Mapping[str, FlatShard]) -> None:
        """Fills this rank's ranges of a checkpoint's tensors.

        Raises CheckpointError on every rank if one rank cannot read its ranges. The targets may then be partly filled.
        """
        loading = partial(dcp.load, dict(targets), storage_reader=reader, planner=ShardLoadPlanner())
        everywhere(lambda: loading(process_group=self._group()))

    def _group(self) -> dist.ProcessGroup:
        """Returns a group of all ranks. It is separate because the writing thread uses it during training.

        The timeout is long, because ranks that are done wait for the slowest disk. They notice at once when a rank is
        gone.
        """
        if self._own_group is None:
            self._own_group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        return self._own_group

    def _write(
        self,
        group: dist.ProcessGroup,
        destination: Path,
        tensors: Mapping[str, Ranges],
        publish: Callable[[], None],
        follow: Callable[[], None],
    ) -> None:
        """Writes the tensors, in the thread if there is one. The first rank calls ``publish`` and then ``follow`` when
        all ranks have written."""
        self._thread = threading.get_ident() if self._asynchronous else None
        first = dist.get_rank(group) == 0

        def write() -> None:
            writer = ChecksummedWriter(destination, publish, self._rest if self._asynchronous else None)
            with _warning_of_stuck_disks(writer, destination):
                dcp.save(dict(tensors), storage_writer=writer, planner=ShardSavePlanner(), process_group=group)

        steps = {
            "could not be saved": write,
            f"is saved, but {folders.LATEST} or older checkpoints could not be changed": lambda: on_first_rank(
                follow, group
            ),
        }
        for complaint, step in steps.items():
            try:
                step()
            # DCP reports an error of one rank to all ranks, as a CheckpointException. Any other exception means that
            # the ranks cannot communicate.
            except (Exception, CheckpointException) as error:
                failure = _failure(destination.parent, complaint, error)
                if first:
                    folders.discard(destination)
                    logger.error(str(failure))
                raise failure from None

    def _rest(self, seconds: float) -> None:
        """Rests after ``seconds`` of work, to leave cores and memory bandwidth to training. Returns early if training
        waits, here or on a rank that fails."""
        end = time.monotonic() + seconds * REST
        while (left := end - time.monotonic()) > 0 and not this_rank.a_rank_fails:
            if self._awaited.wait(min(left, _LOOK)):
                return

    def _follow(self, directory: Path, tag: str, publish_latest: bool) -> None:
        """Updates ``latest`` and removes old checkpoints after a checkpoint is published."""
        if publish_latest:
            folders.write_latest(directory, tag)
        if self._keep_last is not None:
            folders.keep_last(directory, tag, self._keep_last)


@contextmanager
def _warning_of_stuck_disks(writer: ChecksummedWriter, folder: Path) -> Iterator[None]:
    """Logs inside the block while this rank waits for its disk. Nothing can end such a wait: the system may not even
    let the process die."""
    over, name = threading.Event(), f"rank {dist.get_rank()} on {socket.gethostname()}"

    def watch() -> None:
        patience = _PATIENCE
        while not over.wait(patience / 4):
            waited = time.monotonic() - (writer.at_disk or math.inf)
            if waited >= patience:
                logger.warning(
                    f"{name} has waited {waited:.0f} s for its disk to take its part of {folder}, and others wait for "
                    "it; if that lasts, look at that disk"
                )
                patience *= 2

    # From Python 3.12 on, none starts once the interpreter shuts down.
    with suppress(RuntimeError):
        threading.Thread(target=watch, name=f"{THREADS} watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _failure(folder: Path, complaint: str, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{folder} {complaint} ({sentence_of(error, dist.get_rank())}); existing checkpoints are whole: fix the "
        "cause and save again"
    )
