"""A failed or interrupted save keeps the previous checkpoint and leaves no partial one."""

import itertools
import json
import os
import random
import resource
import shutil
import subprocess
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.folder import STATE, read_latest
from ds_lgamp.checkpoint.saver import Saver
from testing.ranks import run_on_ranks, shared_number, started_ranks
from tests.checkpoint.saving import SHAPE, number_of, numbered_state, numbered_tensors

KILLS, SAVES_EACH = 9, 12


def save_until_killed(directory, first, begun, finished):
    """Saves under every tag twice. ``begun`` is the number of the latest save, ``finished`` the number of the latest
    completed one."""
    saver = Saver(asynchronous=True, keep_last=2)
    for number in itertools.count(first):
        tensors = numbered_tensors(number)
        begun.value = number
        saver.save(directory, f"step{number // 2}", tensors, numbered_state(number), publish_latest=True)
        finished.value = number - 1
        for shard in tensors.values():
            shard.values.fill_(-1)
        if number % 3 == 0:
            saver.wait()
            finished.value = number


def check_checkpoints(directory, begun, finished):
    """Checks that ``latest`` names the last finished save or a later one, and that every checkpoint that loads is from
    one save."""
    latest = read_latest(directory)
    assert finished <= number_of(directory / latest) <= begun
    for folder in directory.iterdir():
        if (folder / STATE).exists():
            number_of(folder)
        elif folder.is_dir():
            with pytest.raises(CheckpointError, match="is no checkpoint of ds_lgamp"):
                number_of(folder)


def test_ranks_that_are_killed_leave_a_whole_checkpoint(tmp_path):
    begun, finished = shared_number(), shared_number()
    for kill in range(KILLS):
        first = begun.value + 1
        with started_ranks(2, save_until_killed, tmp_path, first, begun, finished) as (ranks, _):
            while begun.value < first + SAVES_EACH:
                assert all(process.is_alive() for process in ranks)
                time.sleep(0.002)
            time.sleep(random.uniform(0, 0.15))
            killed = [ranks, ranks[:1], ranks[1:]][kill % 3]
            for process in killed:
                process.kill()
            for process in ranks:
                # A surviving rank does not wait for the dead one.
                process.join(timeout=10)
                assert process.exitcode is not None
        check_checkpoints(tmp_path, begun.value, finished.value)
    assert finished.value >= 100


class Recorder:
    """Copies ``directory`` before every system call that renames, removes or syncs.

    Each copy shows the directory after a loss of power at that time: files that were not synced since their last write
    are empty.
    """

    def __init__(self, directory, copies):
        self.directory, self.copies = directory, copies
        self.synced, self.count, self.copying = set(), 0, False

    def record(self):
        self.copying = True
        copy = self.copies / f"{self.count:03}"
        shutil.copytree(self.directory, copy)
        for path in self.directory.rglob("*"):
            if path.is_file() and self.identity(path.stat()) not in self.synced:
                (copy / path.relative_to(self.directory)).write_bytes(b"")
        self.count += 1
        self.copying = False

    def identity(self, status):
        return status.st_ino, status.st_mtime_ns, status.st_size

    def wrap(self, name):
        call = getattr(os, name)

        def wrapped(*arguments, **options):
            if not self.copying:
                self.record()
            if name == "fsync":
                self.synced.add(self.identity(os.fstat(arguments[0])))
            return call(*arguments, **options)

        return wrapped


def save_with_recorder(directory, copies):
    """Saves a tag twice and then another tag, which replaces the first. Keeps a copy of the files after every step of
    the last two saves."""
    saver = Saver(asynchronous=False, keep_last=1)
    recorder = Recorder(directory, copies)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", recorder.wrap("fsync"))
        saver.save(directory, "first", numbered_tensors(1), numbered_state(1), publish_latest=True)
        shutil.rmtree(copies)
        for name in ("replace", "rename", "unlink", "rmdir", "mkdir"):
            patch.setattr(os, name, recorder.wrap(name))
        for number, tag in ((2, "first"), (3, "second")):
            saver.save(directory, tag, numbered_tensors(number), numbered_state(number), publish_latest=True)
    recorder.record()


def test_after_every_step_of_a_save_latest_names_a_whole_checkpoint(tmp_path):
    directory, copies = tmp_path / "checkpoints", tmp_path / "copies"
    run_on_ranks(1, save_with_recorder, directory, copies)
    numbers = [number_of(copy / read_latest(copy)) for copy in sorted(copies.iterdir())]
    assert set(numbers) == {1, 2, 3} and numbers == sorted(numbers)
    assert [path.name for path in directory.glob("*/")] == ["second"]


FULL = (2051, 257)
"""A shape of tensors that do not fit on the small disk."""


def files_below(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@contextmanager
def limited_file_size(rank):
    """Limits files of ``rank`` to 100 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if dist.get_rank() == rank else soft, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def read_only(disk):
    """Remounts the disk, because root ignores file modes."""
    _on_first_rank("mount", "-o", "remount,ro", disk)
    yield
    _on_first_rank("mount", "-o", "remount,rw", disk)


@contextmanager
def occupied(path):
    """Puts a folder in the place of a file."""
    kept = path.with_name("kept")
    _on_first_rank("mv", path, kept)
    _on_first_rank("mkdir", path)
    yield
    _on_first_rank("rmdir", path)
    _on_first_rank("mv", kept, path)


def _on_first_rank(*command):
    if dist.get_rank() == 0:
        subprocess.run(command, check=True)
    dist.barrier()


class Saves(NamedTuple):
    """Saves of one saver that fail. A successful save follows each."""

    directory: Path
    asynchronous: bool

    def run(self, obstacles):
        """Returns for every obstacle the message of the failed save, the files it left, and the checkpoint's number
        before and after the next save."""
        saver, found = Saver(self.asynchronous, keep_last=2), {}
        self.save(saver, "before", 0)
        for number, (name, (obstacle, shape)) in enumerate(obstacles.items(), 1):
            before = files_below(self.directory)
            # Waits, because another rank must not place the obstacle before this one has listed the files.
            dist.barrier()
            with obstacle:
                dist.barrier()
                with pytest.raises(CheckpointError) as error:
                    self.save(saver, f"step{number}", -1, shape)
                dist.barrier()
                left = set(files_below(self.directory)) - set(before)
                tag = read_latest(self.directory)
                dist.barrier()
            last = number_of(self.directory / (tag or f"step{number}"))
            dist.barrier()
            self.save(saver, "after", number)
            found[name] = (str(error.value), left, last, number_of(self.directory / read_latest(self.directory)))
        return found

    def save(self, saver, tag, number, shape=SHAPE):
        tensors, state = numbered_tensors(number, shape), numbered_state(number, shape)
        saver.save(self.directory, tag, tensors, state, publish_latest=True)
        saver.wait()
        dist.barrier()


def saves_that_fail(directory, asynchronous):
    obstacles = {f"rank {rank}": (limited_file_size(rank), SHAPE) for rank in range(2)}
    obstacles["latest"] = (occupied(directory / "latest"), SHAPE)
    return Saves(directory, asynchronous).run(obstacles)


def saves_to_a_small_disk(directory):
    return Saves(directory, True).run({"full": (nullcontext(), FULL), "read-only": (read_only(directory), SHAPE)})


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(tmp_path, asynchronous):
    first, second = run_on_ranks(2, saves_that_fail, tmp_path, asynchronous)
    assert first == second
    for number, rank in enumerate(range(2), 1):
        said, left, last, following = first[f"rank {rank}"]
        assert said.startswith(f"{tmp_path / f'step{number}'} could not be saved (rank {rank}: OSError: [Errno 27]")
        assert said.endswith("; existing checkpoints are whole: fix the cause and save again")
        assert not left and (last, following) == (number - 1, number)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_that_latest_cannot_name_is_whole(tmp_path, asynchronous):
    for found in run_on_ranks(2, saves_that_fail, tmp_path, asynchronous):
        said, left, last, following = found["latest"]
        assert "step3 is saved, but latest or older checkpoints could not be changed (rank 0: IsADirectory" in said
        assert "kept" in left and not any("partial" in path for path in left)
        assert (last, following) == (-1, 3)


def test_a_full_or_read_only_disk_keeps_the_checkpoint_it_has(small_disk):
    first, second = run_on_ranks(2, saves_to_a_small_disk, small_disk)
    assert first == second
    for number, words in enumerate(("OSError: [Errno 28] No space left", "OSError: [Errno 30] Read-only file"), 1):
        said, left, last, following = list(first.values())[number - 1]
        assert words in said and not left and (last, following) == (number - 1, number)


def save_below_a_file(directory):
    saver = Saver(asynchronous=True, keep_last=None)
    with pytest.raises(CheckpointError) as error:
        saver.save(directory / "file", "tag", numbered_tensors(1), numbered_state(1), publish_latest=True)
    return str(error.value)


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for said in run_on_ranks(2, save_below_a_file, tmp_path):
        assert f"{tmp_path / 'file'} is a file; name a folder for checkpoints" in said and "\n" not in said


def save_over_another_release(directory):
    """Returns the folders of tensors after a failed save that would have replaced a checkpoint of another release."""
    state = directory / "tag" / STATE
    state.parent.mkdir()
    state.write_text(json.dumps({"format": 4}))
    (state.parent / "tensors-future").mkdir()
    with limited_file_size(0), pytest.raises(CheckpointError):
        saver = Saver(asynchronous=False, keep_last=None)
        saver.save(directory, "tag", numbered_tensors(1), numbered_state(1), publish_latest=True)
    return [path.name for path in state.parent.glob("tensors-*")]


def test_a_checkpoint_of_another_release_stays_until_it_is_replaced(tmp_path):
    assert run_on_ranks(1, save_over_another_release, tmp_path) == [["tensors-future"]]
