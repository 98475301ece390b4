"""A bad script or configuration file ends the command line in one sentence."""

import json
import os
import subprocess
import sys

import pytest

from testing import ROOT, SCRIPTS
from tests.integrations.deepspeed.config.bad_input import merged
from tests.slow import slow_except

EXAMPLE = SCRIPTS / "public_example.py"


COMMANDS = {
    "no such script": (["missing.py"], None, "'missing.py' is no file; name the script to run"),
    "no such configuration": (
        [str(EXAMPLE), "--deepspeed_config", "no.json"],
        None,
        "no.json cannot be read: ",
    ),
    "a configuration that is no JSON": (
        [str(EXAMPLE), "--deepspeed_config", "c.json"],
        "{'a' 1}",
        "c.json cannot be read: ",
    ),
    "a configuration that is a list": ([str(EXAMPLE), "--deepspeed_config", "c.json"], "[]", "c.json holds list"),
    "two blocks": (
        [str(EXAMPLE), "--deepspeed_config", "c.json"],
        '{"ds_lgamp": {}, "ds_lgamp": {}}',
        "c.json cannot be read: Duplicate keys in DeepSpeed config: ['ds_lgamp']",
    ),
    "a refused key, in a file with a comment": (
        [str(EXAMPLE), "--deepspeed_config=c.json"],
        '{"ds_lgamp": {}, # DeepSpeed reads HJSON\n"torch_autocast": {"enabled": true}}',
        "torch_autocast.enabled is True",
    ),
    "a misspelt key, in a file of the Trainer": (
        [str(SCRIPTS / "trains_with_trainer.py"), "--deepspeed", "c.json", "--output_dir", "runs"],
        '{"train_batch_size": "auto", "ds_lgamp": {"pipeline_rank": 2}}',
        "ds_lgamp.pipeline_rank is no known key; did you mean pipeline_ranks?",
    ),
    "stages that do not divide the ranks": (
        [str(EXAMPLE), "--deepspeed_config", "c.json", "--stages", "2"],
        json.dumps(merged({})),
        "num_stages (2) must divide distributed world size (1); change one of them",
    ),
    "no data": (
        [str(ROOT / "launch" / "pretrain_gpt.py"), "--data-path", "no_data", "--deepspeed_config", "c.json"],
        json.dumps(merged({})),
        "--data-path is no_data, but no_data.tokenizer.json is missing; write it with launch/prepare_data.py",
    ),
}


DEFAULT = ("two blocks",)
"""Cases that are not slow."""


@pytest.mark.parametrize("case", slow_except(DEFAULT, COMMANDS))
def test_the_command_line_ends_with_a_sentence_and_no_traceback(case, tmp_path):
    words, config, expected = COMMANDS[case]
    if config is not None:
        (tmp_path / "c.json").write_text(config)
    environment = {
        **os.environ,
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
        **{"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    }
    done = subprocess.run(
        [sys.executable, "-m", "ds_lgamp", "run", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert expected in last and "Traceback" not in done.stderr, done.stderr
