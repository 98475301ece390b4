"""A run whose ranks are all killed goes on from its live state, to the bit, and loses one step at most."""

import os
import shutil
import signal

import pytest
import torch

from ds_lgamp.checkpoint.folder import open_checkpoint
from ds_lgamp.checkpoint.live_recovery import publish_alone
from ds_lgamp.checkpoint.live_slot import read_header
from ds_lgamp.checkpoint.whole import read_whole
from ds_lgamp.cli.main import main
from testing.ranks import run_on_ranks, shared_number, started_ranks
from tests.integrations.deepspeed.checkpoint.live_runs import (
    CASES,
    SECONDS,
    TORN,
    choose,
    die_while_writing,
    go_on_alone,
    go_on_until_killed,
    kill_all,
    losses,
    resume,
    train_until_killed,
)
from tests.slow import chosen, slow_except

KILLS = 5
OF_FILES = dict.fromkeys(("tensors", "index_checksum"))


@pytest.fixture(scope="module")
def resumed(request, tmp_path_factory):
    """Returns what :func:`resume` does on every rank, by case, and how many steps the killed run had made."""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    wanted = chosen(request, "case") & CASES.keys()
    for ranks in sorted({CASES[name].ranks for name in wanted}):
        cases = {name: case for name, case in CASES.items() if name in wanted and case.ranks == ranks}
        done = kill_all(ranks, 3, train_until_killed, folder, cases)
        by_rank = run_on_ranks(ranks, resume, folder, cases)
        found |= {name: (done, [rank[name] for rank in by_rank]) for name in cases}
    return found


DEFAULT = ["zero 3, two pipeline ranks, tied", "updates behind reductions"]
"""Cases that are not slow: a pipeline with a unit on two ranks, and sharded half precision with three slots."""


@pytest.mark.parametrize("case", slow_except(DEFAULT, list(CASES)))
def test_a_killed_run_goes_on_to_the_bit_and_loses_one_step_at_most(resumed, case):
    done, ranks = resumed[case]
    for begun, own, expected in ranks:
        assert done - 1 <= begun <= done + 1
        assert own == expected


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_has_the_losses_of_one_that_is_not(tmp_path):
    done = shared_number()
    for _ in range(KILLS):
        kill_all(4, 3, go_on_until_killed, tmp_path, done=done)
    made = [tuple(map(float, line.split())) for line in (tmp_path / "losses").read_text().splitlines()]
    expected = run_on_ranks(4, losses, int(made[-1][0]))[0]
    assert all(expected[int(step) - 1] == loss for step, loss in made)
    again = [before - step + 1 for (before, _), (step, _) in zip(made, made[1:]) if step <= before]
    assert all(repeated <= 1 for repeated in again)
    assert {int(step) for step, _ in made} == set(range(1, len(expected) + 1))


@pytest.fixture(scope="module")
def torn(tmp_path_factory):
    """Returns the folder of a run of which rank 0 died while it wrote a state that rank 1 has whole."""
    folder = tmp_path_factory.mktemp("torn")
    with started_ranks(2, die_while_writing, folder) as (ranks, _):
        ranks[0].join(SECONDS)
        assert ranks[0].exitcode == -signal.SIGKILL
    return folder


@pytest.fixture(scope="module")
def choices(tmp_path_factory, torn):
    folder = tmp_path_factory.mktemp("choices")
    return folder, run_on_ranks(2, choose, folder, torn)


def test_a_state_that_one_rank_lacks_is_not_taken(choices):
    assert [rank["torn"] for rank in choices[1]] == [TORN - 1] * 2


def test_the_newest_live_state_becomes_a_checkpoint(choices):
    folder, ranks = choices
    for number, rank in enumerate(ranks):
        loaded = rank["whole"]
        assert loaded[:3] == (4, "global_step4", {"seen": (4, number)})
        goes_on = f"{folder / 'checkpoints'} goes on from the live state of step 4 in {folder / 'copy'}"
        assert loaded.said == ([goes_on] if number == 0 else [])


@pytest.mark.parametrize(("damaged", "named"), [("damaged numbers", "1-"), ("damaged header", "0-")])
def test_a_damaged_file_is_named_and_the_state_before_is_taken(choices, damaged, named):
    for rank in choices[1]:
        assert rank[damaged][:2] == (3, "global_step3")
    assert any(f"/{named}" in said and "is damaged" in said for said in choices[1][0][damaged].said)


@pytest.mark.parametrize("case", ["all damaged", "tag"])
def test_a_checkpoint_is_loaded_where_no_live_state_is_whole_or_a_tag_is_given(choices, case):
    for rank in choices[1]:
        assert rank[case][:3] == (2, "global_step2", {})


def test_live_states_hold_no_weights_for_another_run(choices):
    for rank in choices[1]:
        assert rank["weights only"][:2] == (0, "global_step2")


def test_the_live_state_of_a_run_with_other_checkpoints_is_left_alone(choices):
    folder, ranks = choices
    assert [rank["other checkpoints"][:2] for rank in ranks] == [(0, None)] * 2
    said = f"the live state of step 4 of a run with checkpoints in {folder / 'checkpoints'}"
    assert any(said in sentence for sentence in ranks[0]["other checkpoints"].said)


def test_a_checkpoint_that_is_as_new_is_loaded_as_it_is(choices):
    for rank in choices[1]:
        assert rank["old"] == (4, "global_step4", {}, [])


def test_a_file_in_the_place_of_the_folder_is_refused(choices):
    folder, ranks = choices
    said = (
        f"ds_lgamp.live_checkpoint is '{folder / 'checkpoints' / 'latest'}', which cannot be written (File exists); "
        "name another folder"
    )
    assert [rank["no folder"] for rank in ranks] == [said] * 2


def test_a_run_that_loads_goes_back_and_drops_its_own_states(choices):
    assert [rank["own"] for rank in choices[1]] == [(4, 0)] * 2


def test_a_live_state_becomes_what_save_checkpoint_writes(choices, tmp_path):
    """Both are of step 4, when the running means of the ranks differ."""
    folder, _ = choices
    published = publish_alone(folder / "copy", lambda tag: tmp_path / tag)
    saved = folder / "checkpoints" / published.name
    states, readers = zip(*map(open_checkpoint, (published, saved)))
    ours, theirs = (reader.tensors.keys() for reader in readers)
    assert ours == theirs and {"buffers/0/2.running_mean", "buffers/1-0-0/2.running_mean"} <= ours
    assert {**states[0], **OF_FILES} == {**states[1], **OF_FILES}


def test_a_command_publishes_the_state_before_a_damaged_one(choices, tmp_path):
    folder, _ = choices
    shutil.copytree(folder / "copy", tmp_path / "live")
    for header in (tmp_path / "live").glob("live-*/*.json"):
        if read_header(header).step == 4:
            os.truncate(header.with_suffix(".bin"), 1)
    assert publish_alone(tmp_path / "live", lambda tag: tmp_path / tag).name == "global_step3"


def test_one_rank_goes_on_from_the_state_of_two_which_a_command_can_publish(choices, tmp_path, capfd):
    folder, ranks = choices
    states = tmp_path / "checkpoints"
    publish = ["checkpoint", "publish", str(folder / "copy")]
    # A save of that step was interrupted.
    (states / "global_step4" / "tensors-0badcafe").mkdir(parents=True)
    assert main([*publish, str(states)]) == 0
    assert capfd.readouterr().out == f"wrote {states / 'global_step4'}\n"
    assert (states / "latest").read_text() == "global_step4"
    assert len(list((states / "global_step4").iterdir())) == 2
    assert main([*publish, str(states / "global_step4")]) == 1
    assert "is a checkpoint; name the directory that holds it" in capfd.readouterr().err
    made = read_whole(states / "global_step4")
    shutil.rmtree(folder / "checkpoints")
    ((begun, weights),) = run_on_ranks(1, go_on_alone, folder)
    assert begun == 4 and weights == ranks[0]["weights"]
    published = read_whole(folder / "checkpoints" / "global_step4")
    assert {**made.state, **OF_FILES} == {**published.state, **OF_FILES}
    assert made.parameters.keys() == published.parameters.keys()
    pairs = [(made.parameters, published.parameters), *zip(made.moments.values(), published.moments.values())]
    assert all(torch.equal(ours[name], theirs[name]) for ours, theirs in pairs for name in theirs)
