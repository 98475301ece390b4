"""What becomes of live states when their run ends, and what a full disk does to them."""

import errno
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.checkpoint import rank_state
from ds_lgamp.integrations.user_script import finish_engines
from ds_lgamp.runtime.batch import ActionError
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.checkpoint.live_runs import CASES, Run, heard

STEPS = 3


class End(NamedTuple):
    """How a run of ``STEPS`` steps ends."""

    saved: int | None
    """The step after which it saves a checkpoint."""
    loaded: bool = False
    """Whether it then loads that checkpoint, at its end."""
    destroyed: bool = False
    """Whether the script destroys the engine, before the end of the process group."""
    case: str = "zero 3"


ENDS = {
    "saved": End(STEPS),
    "saved and destroyed": End(STEPS, destroyed=True),
    "saved and loaded": End(STEPS - 1, loaded=True),
    "saved before": End(STEPS - 1, destroyed=True),
    "never saved": End(None),
    "never saved, updates in the next step": End(None, case="updates in the next step"),
}


class Ended(NamedTuple):
    """What a run has left."""

    files: list[str]
    said: list[str]
    begun: int
    """The step at which the next run goes on."""


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("live-*/*"))


def end(folder: Path, ended: End) -> Ended:
    run = Run(CASES[ended.case], folder / "live")
    for step in range(1, STEPS + 1):
        run.step()
        if step == ended.saved:
            run.engine.save_checkpoint(str(folder / "checkpoints"))
    if ended.loaded:
        run.load(folder / "checkpoints", tag=f"global_step{ended.saved}")
    with heard(rank_state.logger) as said:
        if ended.destroyed:
            run.engine.destroy()
        # What the end of the process group does, and the end of the process does again.
        finish_engines()
        finish_engines()
    dist.barrier()
    files = files_in(folder / "live")
    dist.barrier()
    return Ended(files, said, Run(CASES[ended.case], folder / "live").load(folder / "checkpoints"))


def goes_back(folder: Path) -> Ended:
    """A run saves twice. Another one goes on from the older checkpoint, and saves nothing."""
    saved = folder / "checkpoints"
    run = Run(CASES["zero 3"], folder / "first")
    for _ in range(STEPS):
        run.step()
        run.engine.save_checkpoint(str(saved))
    run.engine.destroy()
    run = Run(CASES["zero 3"], folder / "live")
    run.engine.load_checkpoint(str(saved), tag="global_step1")
    run.step()
    with heard(rank_state.logger) as said:
        run.engine.destroy()
    return Ended(files_in(folder / "live"), said, run.engine.global_steps)


def end_all(folder: Path) -> dict[str, Ended]:
    prepare_rank()
    ends = {name: end(folder / name, ended) for name, ended in ENDS.items()}
    return {**ends, "went back": goes_back(folder / "went back")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ends")


@pytest.fixture(scope="module")
def ended(folder):
    return run_on_ranks(2, end_all, folder)


@pytest.mark.parametrize("name", ["saved", "saved and destroyed", "saved and loaded"])
def test_nothing_is_left_if_a_checkpoint_is_as_new(ended, folder, name):
    for rank in ended:
        assert rank[name] == ([], [], ENDS[name].saved)
    assert not list((folder / name / "live").iterdir())


def test_states_stay_that_are_older_than_a_checkpoint_of_another_run(ended):
    for number, rank in enumerate(ended):
        assert f"{number}-0.bin" in rank["went back"].files and rank["went back"].begun < STEPS
    assert "keeps the live state of step 2" in "".join(ended[0]["went back"].said)


@pytest.mark.parametrize("name", ["saved before", "never saved", "never saved, updates in the next step"])
def test_else_the_states_stay_and_the_next_run_goes_on_from_the_last_step(ended, name):
    for rank in ended:
        assert {f"{number}-{slot}.{kind}" for number in (0, 1) for slot in (0, 1) for kind in ("bin", "json")} == {
            *rank[name].files
        }
        assert rank[name].begun == STEPS


@pytest.mark.parametrize(("name", "target"), [("saved before", None), ("never saved", "CHECKPOINTS")])
def test_rank_0_tells_once_where_they_are_and_what_to_do(ended, folder, name, target):
    states = folder / name / "live"
    (said,), silent = (rank[name].said for rank in ended)
    publish = f"ds_lgamp checkpoint publish {states} {target or folder / name / 'checkpoints'} makes it a checkpoint"
    assert said.startswith(f"{states} keeps the live state of step {STEPS}, ") and not silent
    assert f": load_checkpoint goes on from it, and {publish}; if you need neither, remove the folder" in said
    (gigabytes,) = re.findall(r", (\S+) GB on this node", said)
    assert 1e-6 < float(gigabytes) < 1e-3


def fill(disk: Path) -> None:
    """Leaves no page of ``disk`` free."""
    with open(disk / "rest", "wb", buffering=0) as file, pytest.raises(OSError) as full:
        while True:
            file.write(bytes(4096))
    assert full.value.errno == errno.ENOSPC


class Full(NamedTuple):
    """What a run on a full disk tells, and leaves."""

    error: str
    said: list[str]
    files: list[str]
    begun: int


def train_on_a_full_disk(disk: Path, checkpoints: Path, saves: bool) -> Full:
    """Fills the disk after the first step. The error comes in the third."""
    prepare_rank()
    run = Run(CASES["zero 3"], disk / "live")
    run.step()
    run.engine.lgamp.live.wait()
    fill(disk)
    run.step()
    with pytest.raises(ActionError) as full:
        run.step()
    if saves:
        run.engine.save_checkpoint(str(checkpoints))
    with heard(rank_state.logger) as said:
        # The step has said what is wrong. The end does not say so again.
        run.engine.destroy()
    files = files_in(disk / "live")
    (disk / "rest").unlink()
    return Full(str(full.value), said, files, Run(CASES["zero 3"], disk / "live").load(checkpoints))


def test_a_full_disk_ends_the_run_with_a_sentence_and_keeps_the_state_before(small_disk, tmp_path):
    (found,) = run_on_ranks(1, train_on_a_full_disk, small_disk, tmp_path / "checkpoints", False)
    sentence = (
        f"the live state in {small_disk / 'live'} cannot be written (No space left on device); make room there, or "
        "remove live_checkpoint"
    )
    assert sentence in found.error
    (said,) = found.said
    assert said.startswith(f"{small_disk / 'live'} keeps the live state of step 1, ") and found.begun == 1


def test_a_run_on_a_full_disk_that_saves_leaves_nothing_there(small_disk, tmp_path):
    (found,) = run_on_ranks(1, train_on_a_full_disk, small_disk, tmp_path / "checkpoints", True)
    assert (found.said, found.files, found.begun) == ([], [], 2)


def publishes_beside_what_it_loaded(folder: Path) -> list[str]:
    """A run loads what another one has saved, and dies before it saves anything itself."""
    prepare_rank()
    case, saved = CASES["zero 0"]._replace(block={"keep_last": 1}), folder / "saved"
    other = Run(case)
    other.step()
    other.engine.save_checkpoint(str(saved))
    run = Run(case, folder / "live")
    run.load(saved)
    run.step()
    run.engine.lgamp.live.wait()
    shutil.copytree(folder / "live", folder / "copy")
    next_run = Run(case, folder / "copy")
    assert next_run.load(saved) == 2
    return sorted(path.name for path in saved.iterdir() if path.is_dir())


def test_a_published_state_removes_no_checkpoint_that_its_run_has_not_saved(tmp_path):
    assert run_on_ranks(1, publishes_beside_what_it_loaded, tmp_path) == [["global_step1", "global_step2"]]


def refused(folder: Path) -> list[str]:
    """Returns why engines are refused: a second one in the folder of a living one, and one of a Trainer."""
    prepare_rank()
    case, sentences = CASES["zero 0"], []
    first = Run(case, folder)
    first.step()
    with pytest.raises(ConfigError) as error:
        Run(case, folder)
    sentences.append(str(error.value))
    first.engine.destroy()
    Run(case, folder).engine.destroy()
    trainer = HfTrainerDeepSpeedConfig({"train_batch_size": 1})
    with pytest.raises(ConfigError) as error:
        Run(case, folder)
    del trainer
    Run(case, folder)
    return [*sentences, str(error.value)]


def test_two_engines_in_one_folder_and_engines_of_a_trainer_are_refused(tmp_path):
    for two, trainer in run_on_ranks(2, refused, tmp_path):
        own = f"ds_lgamp.live_checkpoint is '{tmp_path}', "
        assert two == (
            f"{own}where another engine of the script has its states; name another folder, or destroy that engine first"
        )
        assert trainer == (
            f"{own}but transformers' Trainer counts steps and data in its own checkpoints, and would repeat those of a "
            "live state; remove it, and set save_steps"
        )
