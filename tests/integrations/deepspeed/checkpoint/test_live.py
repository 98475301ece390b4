"""A run whose ranks are all killed goes on from its live state, to the bit, and loses one step at most."""

import random
import shutil
import signal
import time

import pytest
import torch

from ds_lgamp.checkpoint.whole import read_whole
from ds_lgamp.cli.main import main
from testing.ranks import run_on_ranks, shared_number, started_ranks
from tests.integrations.deepspeed.checkpoint.live_runs import (
    CASES,
    TORN,
    choose,
    die_while_writing,
    go_on_alone,
    go_on_until_killed,
    losses,
    resume,
    train_until_killed,
)

SECONDS = 120
KILLS = 5
OF_FILES = dict.fromkeys(("tensors", "index_checksum"))


def killed(folder, cases, steps=3):
    """Kills all ranks at a random time after ``steps`` steps. Returns how many steps they have made."""
    done = shared_number()
    with started_ranks(2, train_until_killed, folder, cases, done) as (ranks, results):
        deadline = time.monotonic() + SECONDS
        while done.value < steps:
            assert all(process.is_alive() for process in ranks), results.get()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.2))
        for process in ranks:
            process.kill()
    return done.value


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return killed(folder, CASES), run_on_ranks(2, resume, folder, CASES)


@pytest.mark.parametrize("case", list(CASES))
def test_a_killed_run_goes_on_to_the_bit_and_loses_one_step_at_most(resumed, case):
    done, ranks = resumed
    for rank in ranks:
        begun, own, expected = rank[case]
        assert done - 1 <= begun <= done + 1
        assert own == expected


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_has_the_losses_of_one_that_is_not(tmp_path):
    done = shared_number()
    for _ in range(KILLS):
        target = done.value + 3
        with started_ranks(4, go_on_until_killed, tmp_path, done) as (ranks, results):
            deadline = time.monotonic() + SECONDS
            while done.value < target:
                assert all(process.is_alive() for process in ranks), results.get()
                assert time.monotonic() < deadline
                time.sleep(0.001)
            time.sleep(random.uniform(0, 0.1))
            for process in ranks:
                process.kill()
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
def chosen(tmp_path_factory, torn):
    folder = tmp_path_factory.mktemp("choices")
    return folder, run_on_ranks(2, choose, folder, torn)


def test_a_state_that_one_rank_lacks_is_not_taken(chosen):
    assert [rank["torn"] for rank in chosen[1]] == [TORN - 1] * 2


def test_the_newest_live_state_becomes_a_checkpoint(chosen):
    folder, ranks = chosen
    for number, rank in enumerate(ranks):
        loaded = rank["whole"]
        assert loaded[:3] == (4, "global_step4", {"seen": (4, number)})
        goes_on = f"{folder / 'checkpoints'} goes on from the live state of step 4 in {folder / 'copy'}"
        assert loaded.said == ([goes_on] if number == 0 else [])


@pytest.mark.parametrize(("damaged", "named"), [("damaged numbers", "1-"), ("damaged header", "0-")])
def test_a_damaged_file_is_named_and_the_state_before_is_taken(chosen, damaged, named):
    for rank in chosen[1]:
        assert rank[damaged][:2] == (3, "global_step3")
    assert any(f"/{named}" in said and "is damaged" in said for said in chosen[1][0][damaged].said)


@pytest.mark.parametrize("case", ["all damaged", "tag"])
def test_a_checkpoint_is_loaded_where_no_live_state_is_whole_or_a_tag_is_given(chosen, case):
    for rank in chosen[1]:
        assert rank[case][:3] == (2, "global_step2", {})


def test_live_states_hold_no_weights_for_another_run(chosen):
    for rank in chosen[1]:
        assert rank["weights only"][:2] == (0, "global_step2")


def test_the_live_state_of_a_run_with_other_checkpoints_is_left_alone(chosen):
    folder, ranks = chosen
    assert [rank["other checkpoints"][:2] for rank in ranks] == [(0, None)] * 2
    said = f"the live state of step 4 of a run with checkpoints in {folder / 'checkpoints'}"
    assert any(said in sentence for sentence in ranks[0]["other checkpoints"].said)


def test_a_checkpoint_that_is_as_new_is_loaded_as_it_is(chosen):
    for rank in chosen[1]:
        assert rank["old"] == (4, "global_step4", {}, [])


def test_a_file_in_the_place_of_the_folder_is_refused(chosen):
    folder, ranks = chosen
    said = (
        f"ds_lgamp.live_checkpoint is '{folder / 'checkpoints' / 'latest'}', which is no folder (File exists); name one"
    )
    assert [rank["no folder"] for rank in ranks] == [said] * 2


def test_a_run_that_loads_goes_back_and_drops_its_own_states(chosen):
    assert [rank["own"] for rank in chosen[1]] == [(4, 0)] * 2


def test_one_rank_goes_on_from_the_state_of_two_which_a_command_can_publish(chosen, tmp_path, capfd):
    folder, ranks = chosen
    states = tmp_path / "checkpoints"
    states.mkdir()
    assert main(["checkpoint", "publish", str(folder / "copy"), str(states)]) == 0
    assert capfd.readouterr().out == f"wrote {states / 'global_step4'}\n"
    made = read_whole(states / "global_step4")
    shutil.rmtree(folder / "checkpoints")
    ((begun, weights),) = run_on_ranks(1, go_on_alone, folder)
    assert begun == 4 and weights == ranks[0]["weights"]
    published = read_whole(folder / "checkpoints" / "global_step4")
    assert {**made.state, **OF_FILES} == {**published.state, **OF_FILES}
    assert made.parameters.keys() == published.parameters.keys()
    pairs = [(made.parameters, published.parameters), *zip(made.moments.values(), published.moments.values())]
    assert all(torch.equal(ours[name], theirs[name]) for ours, theirs in pairs for name in theirs)
