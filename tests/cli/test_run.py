"""Options of ``ds_lgamp run`` that exclude each other are refused before anything starts."""

import pytest

from ds_lgamp.cli.main import main


@pytest.mark.parametrize("option", ["--measure", "--trace", "--trace-steps"])
def test_what_trains_nothing_can_see_nothing_of_training(capsys, option):
    with pytest.raises(SystemExit) as status:
        main(["run", "--explain", option, "x", "train.py"])
    assert status.value.code == 2
    assert f"--explain trains nothing that {option} could see; remove one of them" in capsys.readouterr().err


@pytest.mark.parametrize("options", [("--measure", "x"), ("--explain",)])
def test_megatron_lms_loop_takes_no_options_for_deepspeeds_engine(capsys, options):
    with pytest.raises(SystemExit) as status:
        main(["run", *options, "pretrain_gpt.py", "--ds-lgamp-config", "config.json"])
    assert status.value.code == 2
    assert "are for DeepSpeed's engine, not for a run with --ds-lgamp-config" in capsys.readouterr().err


def test_megatron_lms_loop_takes_its_block_from_a_file(capsys):
    with pytest.raises(SystemExit) as status:
        main(["run", "--block", "{}", "pretrain_gpt.py", "--ds-lgamp-config", "config.json"])
    assert status.value.code == 2
    assert "--block is for DeepSpeed's engine; write the block into the file" in capsys.readouterr().err
