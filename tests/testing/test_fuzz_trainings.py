"""The fuzz of own models and loops: its ways are sound, and what it calls equal, refused and a defect."""

import math
import subprocess
import sys

import pytest

from testing import ROOT
from testing.fuzz.run import train_all
from testing.fuzz.source import script
from testing.fuzz.trainings import Training, of_case, train_alone
from testing.fuzz.ways import WAYS

OURS = 'type(engine).__name__ != "Plain"'
"""True in a loop that ds_lgamp trains."""


def training(slots: dict[str, str] | None = None, pipeline_ranks: int = 1, data_ranks: int = 1) -> Training:
    block = {"pipeline_ranks": pipeline_ranks} if pipeline_ranks > 1 else {}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "ds_lgamp": block,
    }
    source = script([slots or {}], micro_batches=2, count=3)
    return Training((), source, pipeline_ranks, data_ranks, 2, "SGD(trained, 0.1)", config)


@pytest.mark.slow
def test_every_way_trains_in_a_plain_process():
    failed = []
    for name, slots in WAYS.items():
        try:
            seen = train_alone(training(slots)).seen
            assert all(map(math.isfinite, seen.values())) and len({*seen.values()}) > 1
        except Exception as error:
            failed.append(f"{name}: {error}")
    assert not failed, failed


def test_a_training_depends_on_its_number_alone():
    assert [of_case(case) for case in range(20)] == [of_case(case) for case in range(20)]


def test_trainings_are_equal_or_refused_and_all_else_is_a_defect():
    outcomes = train_all(
        {
            0: training(),
            1: training(WAYS["the blocks twice"]),
            2: training({"unpack": f"loss = output * (1.001 if {OURS} else 1.0)"}),
            3: training({"after_step": f"if {OURS} and step == 2:\n    model.head.bias.data.add_(1e-3)"}),
            4: training({"start": 'raise KeyError("broken alike")'}),
            5: training({"before_step": f'if {OURS}:\n    raise KeyError("broken")'}),
        }
    )
    assert {case: outcome.kind for case, outcome in outcomes.items()} == {
        0: "equal",
        1: "refused",
        2: "defect: other numbers",
        3: "defect: other values",
        4: "fails alone",
        5: "defect: KeyError",
    }
    assert "6 of 3 blocks" in outcomes[1].text
    assert "head.bias" in outcomes[3].text and "broken" in outcomes[5].text


def test_habits_of_scripts_train_as_in_a_plain_process_or_are_refused():
    kinds = {
        "a dtype of the script": "equal",
        "a generator of torch in blocks in training": "equal",
        "a mask in a global in training": "refused",
        "blocks that change places": "refused",
        "frozen views of a buffer": "refused",
        "tensors of blocks that change in training": "equal",
        "a tensor of all blocks that changes in training": "refused",
        "the gradients of a model dropped inside a batch": "refused",
        "views of a buffer that changes between steps": "equal",
    }
    outcomes = train_all({case: training(WAYS[way], pipeline_ranks=2) for case, way in enumerate(kinds)})
    assert {way: outcomes[case].kind for case, way in enumerate(kinds)} == kinds


@pytest.mark.slow
def test_trainings_behind_one_that_ends_its_processes_go_on():
    outcomes = train_all(
        {
            0: training({"before_step": f"if {OURS}:\n    import os\n    os._exit(3)"}),
            1: training({"before_step": f"if {OURS}:\n    import time\n    time.sleep(1000)"}),
            2: training(),
            3: training(
                {"before_step": f'if {OURS} and ranks == [1]:\n    raise KeyError("broken")'}, pipeline_ranks=2
            ),
            4: training({"before_step": 'if ranks == [1]:\n    raise KeyError("broken alike")'}, data_ranks=2),
            5: training(pipeline_ranks=2),
            6: training(data_ranks=2),
        },
        limit=20,
    )
    assert {case: outcome.kind for case, outcome in outcomes.items()} == {
        0: "defect: no end",
        1: "defect: hang",
        2: "equal",
        3: "defect: KeyError",
        4: "fails alone",
        5: "equal",
        6: "equal",
    }
    assert "died" in outcomes[0].text and "in train" in outcomes[1].text


@pytest.mark.slow
def test_a_printed_script_trains_by_itself(tmp_path):
    file = tmp_path / "script.py"
    made = of_case(5)
    file.write_text(made.file)
    run = subprocess.run([sys.executable, file], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert run.stdout.strip() == str(train_alone(made).seen), run.stderr
