"""What a live state waits for, and what waits for it, where its thread is slow."""

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

from ds_lgamp.checkpoint.live_slot import LiveSlot, read_blobs, read_header
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.checkpoint.test_live_slot import holding
from tests.integrations.deepspeed.checkpoint.live_runs import CASES, Run, headers_in

ONE_STEP = "zero 3"
DELAY = 0.3
"""Seconds for which the thread leaves a unit alone before it copies it. A step takes much less."""
FIRST = "0.weight"


def steps_on_disk(folder: Path) -> set[int]:
    return {header.step for _, header in headers_in(folder)}


def weights_in(folder: Path, step: int) -> torch.Tensor:
    """Returns the weights of the first layer in the state of a step."""
    (header,) = (path for path, header in headers_in(folder) if header.step == step)
    (shard,) = read_blobs(header, read_header(header))[f"parameters/{FIRST}"]
    return shard.values.clone()


def slowly(write):
    def written(slot, key, dtype, length, pieces, held):
        threading.Event().wait(DELAY if "0.weight" in str(held) else 0)
        return write(slot, key, dtype, length, pieces, held)

    return written


def changes_while_it_is_copied(folder: Path) -> tuple[bool, bool]:
    """Returns whether the state of the first step has the weights of that step, and whether the run has others."""
    prepare_rank()
    run = Run(CASES[ONE_STEP], folder)
    LiveSlot.write = slowly(LiveSlot.write)
    run.step()
    (parameter,) = (value for name, value in run.engine.module.named_parameters() if name == FIRST)
    after_step = safe_get_full_fp32_param(parameter).clone()
    safe_set_full_fp32_param(parameter, torch.zeros_like(after_step))
    run.engine.lgamp.live.wait()
    kept = torch.equal(weights_in(folder, 1), after_step.flatten())
    return kept, bool((safe_get_full_fp32_param(parameter) == 0).all())


def steps_before_sums(folder: Path) -> list[set[int]]:
    """Returns which states are on the disk when ranks begin the sum that ends a step, for three steps."""
    prepare_rank()
    run = Run(CASES[ONE_STEP], folder)
    LiveSlot.write = slowly(LiveSlot.write)
    finish, found = run.engine.lgamp.partition.finish_gradients, []

    def finishing():
        found.append(steps_on_disk(folder))
        finish()

    run.engine.lgamp.partition.finish_gradients = finishing
    for _ in range(3):
        run.step()
    return found


def leaves_the_working_directory(folder: Path) -> set[int]:
    """Returns which states are in a folder that is relative to a working directory that the script has left."""
    prepare_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run = Run(CASES[ONE_STEP], Path("live"))
        run.step()
        patch.chdir(folder.parent)
        for _ in range(2):
            run.step()
        run.engine.lgamp.live.wait()
        return steps_on_disk(folder / "live")


def beside_another_job(folder: Path) -> list[bool]:
    """Returns whether another job's states are there, while it runs and after its end."""
    prepare_rank()
    other = folder / "live-0badcafe" / "0-0.bin"
    run, found = Run(CASES[ONE_STEP], folder), []
    with holding(folder) as job:
        run.step()
        run.engine.lgamp.live.wait()
        found.append(other.exists())
        job.kill()
        job.wait()
        run.step()
        run.engine.lgamp.live.wait()
        found.append(other.exists())
    return found


def removed_by_somebody(folder: Path) -> tuple[list[int], set[str]]:
    """Returns the steps whose states are whole after somebody has removed all files, and what all of them hold."""
    prepare_rank()
    run = Run(CASES[ONE_STEP], folder)
    for _ in range(2):
        run.step()
    run.engine.lgamp.live.wait()
    shutil.rmtree(folder)
    for _ in range(3):
        run.step()
    run.engine.lgamp.live.wait()
    held = {header.step: read_blobs(path, header).keys() for path, header in headers_in(folder)}
    return sorted(held), set.intersection(*map(set, held.values()))


def test_states_stay_in_their_folder_if_the_working_directory_changes(tmp_path):
    assert run_on_ranks(1, leaves_the_working_directory, tmp_path) == [{2, 3}]


def test_the_states_of_a_job_that_runs_are_left_alone(tmp_path):
    assert run_on_ranks(1, beside_another_job, tmp_path) == [[True, False]]


def test_states_that_somebody_removes_are_written_anew_also_what_is_frozen(tmp_path):
    ((steps, held),) = run_on_ranks(1, removed_by_somebody, tmp_path)
    assert steps == [4, 5] and {"parameters/0.weight", "parameters/3.weight"} <= held


def test_a_change_between_steps_waits_until_the_state_of_the_step_is_copied(tmp_path):
    assert run_on_ranks(1, changes_while_it_is_copied, tmp_path) == [(True, True)]


def test_the_sum_that_ends_a_step_waits_until_the_state_of_the_last_one_is_whole(tmp_path):
    """So a rank gives up an older state only when all ranks have the last one."""
    assert run_on_ranks(1, steps_before_sums, tmp_path) == [[set(), {1}, {1, 2}]]


def test_a_slot_that_is_being_written_holds_no_state(tmp_path):
    slot = LiveSlot(tmp_path / "run" / "0-0")
    slot.open()
    slot.seal({})
    assert list((tmp_path / "run").glob("*.json"))
    slot.open()
    assert not list((tmp_path / "run").glob("*.json"))


def test_a_slot_that_is_removed_takes_no_memory(tmp_path):
    slot = LiveSlot(tmp_path / "run" / "0-0")
    slot.open()
    slot.seal({})
    slot.remove()
    assert not list((tmp_path / "run").iterdir())
    # A file that is open keeps its memory without a name.
    opened = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert not any(str(tmp_path) in path for path in opened)
