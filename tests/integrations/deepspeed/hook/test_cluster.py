"""``ds_lgamp run --cluster`` trains an unedited script with the losses of any other order of its ranks."""

import json

import pytest

from testing import SCRIPTS
from testing.launching import torchrun, torchrun_on_nodes
from tests.planner.islands import island
from tests.slow import slow_except

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 3},
    "ds_lgamp": {},
}


def losses(text: str) -> list[float]:
    """Returns what ``public_example.py`` or ``plain_gpt2.py`` prints."""
    results = [line.split()[2:] for line in text.splitlines() if line.startswith("RESULT")]
    words = results[0] if results else [line.split()[1] for line in text.splitlines() if line.startswith("loss ")]
    assert words, text
    return [float(word) for word in words]


SCRIPT_WORDS = {
    "public_example.py": (["--deepspeed_config"], {}),
    # The model of transformers has groups of shards, which must be those of the islands.
    "plain_gpt2.py": (["--layers", "4", "--deepspeed"], {"zero_hpz_partition_size": 2}),
}


@pytest.mark.parametrize("script", slow_except([], list(SCRIPT_WORDS), slow=["plain_gpt2.py"]))
def test_losses_do_not_depend_on_who_is_which_rank(script, tmp_path):
    """The island of node 1 comes first in the file and has the fast network. A dry run says what the step sends."""
    words, zero = SCRIPT_WORDS[script]
    config, file = tmp_path / "ds_config.json", tmp_path / "cluster.json"
    config.write_text(json.dumps({**CONFIG, "zero_optimization": {"stage": 3, **zero}}))
    between = {"bandwidth": "100 Mbit/s", "latency": "1 ms"}
    file.write_text(json.dumps({"islands": [island("east", ["b"]), island("west", ["a"])], "between": between}))
    command = [str(SCRIPTS / script), *words, str(config)]
    placed = torchrun_on_nodes(["-m", "ds_lgamp", "run", "--cluster", str(file), *command], ["a", "b"])
    assert "data-parallel groups stay together on nodes" in placed and "islands in the order east, west" in placed
    assert losses(placed) == losses(torchrun(4, ["-m", "ds_lgamp", "run", *command]))
