"""The commands that torchrun.sh, elastic.sh, deepspeed.sh and slurm.sh would run, their refusals, and one real run."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from testing import ROOT, SCRIPTS

LAUNCH = ROOT / "launch"
EXAMPLE = SCRIPTS / "public_example.py"
BIN = Path(sys.executable).parent
ARGUMENTS = ["--dry-run", "--data path", "a b", "*", "it's", '"$HOME"', "--", ""]
"""Arguments of the user's script that a careless launch script would swallow, split or expand."""


def start(launcher: str, *words: object, path: Path = BIN, **settings: object) -> subprocess.CompletedProcess:
    """Runs a launch script with these settings and without those of the surrounding environment."""
    environment = {
        "PATH": f"{path}:{BIN}:/usr/bin:/bin",
        "HOME": os.environ.get("HOME", "/"),
        "CUDA_VISIBLE_DEVICES": "",
        **{name: str(value) for name, value in settings.items()},
    }
    command = ["bash", str(LAUNCH / f"{launcher}.sh"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)


def dry_run(launcher: str, *words: object, **settings: object) -> list[str]:
    """Returns the words of the command that would run."""
    done = start(launcher, "--dry-run", *words, **settings)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return shlex.split(line)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "my script.py"
    path.touch()
    return path


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "my hosts"
    path.write_text("first slots=8\nsecond slots=8\n")
    return path


SLURM = {
    "SLURM_JOB_ID": 431234,
    "SLURM_JOB_NODELIST": "gpu[03-05,9],login",
    "SLURM_JOB_NUM_NODES": 5,
    "SLURM_GPUS_ON_NODE": 8,
}
SEVERAL = {"GPUS_PER_NODE": 8, "NNODES": 3, "MASTER_ADDR": "first"}
DRY_RUNS = [
    ("torchrun", {"GPUS_PER_NODE": 4}, "torchrun --standalone --nproc_per_node 4"),
    (
        "torchrun",
        SEVERAL,
        "torchrun --nnodes 3 --rdzv_backend c10d --rdzv_endpoint first:29500 --rdzv_id ds_lgamp --nproc_per_node 8",
    ),
    (
        "torchrun",
        {**SEVERAL, "MASTER_PORT": 1234, "JOB_ID": "seventh"},
        "torchrun --nnodes 3 --rdzv_backend c10d --rdzv_endpoint first:1234 --rdzv_id seventh --nproc_per_node 8",
    ),
    (
        "torchrun",
        {**SEVERAL, "NODE_RANK": 0},
        "torchrun --nnodes 3 --node_rank 0 --master_addr first --master_port 29500 --nproc_per_node 8",
    ),
    ("elastic", {"GPUS_PER_NODE": 4}, "torchrun --max-restarts 10 --standalone --nproc_per_node 4"),
    (
        "elastic",
        {"GPUS_PER_NODE": 8, "NNODES": "2:4", "MASTER_ADDR": "first", "RESTARTS": 3, "GATHERING": 5},
        "env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --max-restarts 3 --nnodes 2:4 --rdzv_backend c10d "
        "--rdzv_endpoint first:29500 --rdzv_id ds_lgamp --rdzv_conf last_call_timeout=5 --nproc_per_node 8",
    ),
    ("deepspeed", {"GPUS_PER_NODE": 4, "MASTER_PORT": 1234}, "deepspeed --num_gpus 4 --master_port 1234"),
    ("deepspeed", {"CUDA_VISIBLE_DEVICES": "2,3", "MASTER_PORT": 1234}, "deepspeed --master_port 1234"),
    ("slurm", SLURM, "--rdzv_endpoint gpu03:21234 --rdzv_id 431234 --nproc_per_node 8"),
    (
        "slurm",
        SLURM,
        "srun --nodes 5 --ntasks 5 --ntasks-per-node 1 --kill-on-bad-exit=1 torchrun --nnodes 5 --rdzv_backend c10d",
    ),
    ("slurm", {**SLURM, "SLURM_CPUS_PER_TASK": 12}, "--kill-on-bad-exit=1 --cpus-per-task 12 torchrun"),
    ("slurm", {**SLURM, "MASTER_ADDR": "login", "MASTER_PORT": 1}, "--rdzv_endpoint login:1"),
    ("slurm", {**SLURM, "GPUS_PER_NODE": 2}, "--nproc_per_node 2"),
]


@pytest.mark.parametrize(("launcher", "settings", "expected"), DRY_RUNS)
def test_a_dry_run_prints_the_command_and_leaves_the_script_its_arguments(launcher, settings, expected, script):
    words = dry_run(launcher, script, *ARGUMENTS, **settings)
    assert f"{expected} " in " ".join(words)
    module = "--module" if launcher == "deepspeed" else "-m"
    tail = [module, "ds_lgamp", "run", str(script), *ARGUMENTS]
    assert words[-len(tail) :] == tail


@pytest.mark.parametrize("launcher", ["torchrun", "elastic", "deepspeed", "slurm"])
def test_options_of_ds_lgamp_run_come_ahead_of_the_script(launcher, script):
    settings = {**SLURM, "GPUS_PER_NODE": 4, "MASTER_PORT": 1234, "RUN_OPTIONS": "--cluster  ours.json --trace traces"}
    words = dry_run(launcher, script, "--flag", **settings)
    assert words[words.index("run") + 1 :] == ["--cluster", "ours.json", "--trace", "traces", str(script), "--flag"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"GPUS_PER_NODE": 4}, ["--num_gpus", "4"]),
        ({"NNODES": 1, "MASTER_ADDR": "10.0.0.1"}, ["--num_nodes", "1", "--master_addr", "10.0.0.1"]),
    ],
)
def test_a_hostfile_names_the_nodes(settings, expected, script, hostfile):
    words = dry_run("deepspeed", script, "a b", HOSTFILE=hostfile, MASTER_PORT=1234, **settings)
    assert words == [
        *("deepspeed", "--hostfile", str(hostfile), *expected, "--master_port", "1234"),
        *("--module", "ds_lgamp", "run", str(script), "a b"),
    ]


def test_the_deepspeed_launcher_gets_a_free_port(script):
    words = dry_run("deepspeed", script, GPUS_PER_NODE=1)
    port = int(words[words.index("--master_port") + 1])
    assert port > 0, "each rank would pick its own port"
    with socket.socket() as free:
        free.bind(("", port))


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu-a,gpu-b", "gpu-a"),
        ("login,gpu[1-2]", "login"),
        ("gpu[9,11-12]", "gpu9"),
        ("rack2-gpu[03]-ib,login", "rack2-gpu03-ib"),
    ],
)
def test_the_first_node_of_a_slurm_job_is_the_meeting_point(nodes, first, script):
    words = dry_run("slurm", script, **{**SLURM, "SLURM_JOB_NODELIST": nodes})
    assert words[words.index("--rdzv_endpoint") + 1] == f"{first}:21234"


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def test_where_there_is_slurm_it_names_the_nodes(script, tmp_path):
    program(tmp_path, "scontrol", """[ "$*" = "show hostnames gpu[03-05,9],login" ] && printf 'asked\\nother\\n'""")
    words = dry_run("slurm", script, path=tmp_path, **SLURM)
    assert words[words.index("--rdzv_endpoint") + 1] == "asked:21234"


@pytest.mark.parametrize(
    ("launcher", "program_name", "settings"),
    [
        ("torchrun", "torchrun", {"GPUS_PER_NODE": 4}),
        ("elastic", "torchrun", {"GPUS_PER_NODE": 4}),
        ("deepspeed", "deepspeed", {"GPUS_PER_NODE": 4, "MASTER_PORT": 1234}),
        ("slurm", "srun", SLURM),
    ],
)
def test_without_dry_run_the_same_command_runs(launcher, program_name, settings, script, tmp_path):
    program(tmp_path, program_name, r"""printf '%s\0' "${0##*/}" "$@"; exit 7""")
    done = start(launcher, "--", script, *ARGUMENTS, path=tmp_path, **settings)
    assert done.returncode == 7, "the launcher's exit status is the script's"
    assert done.stdout.split("\0")[:-1] == dry_run(launcher, script, *ARGUMENTS, **settings)


REFUSALS = [
    ("no script is given; use ", [], {}),
    ("there is no script missing.py", ["missing.py"], {}),
    ("--measure is no option; the script comes first, then its own options", ["--measure", EXAMPLE], {}),
    ("GPUS_PER_NODE is 0; set it to the ranks per node, from 1", [EXAMPLE], {"GPUS_PER_NODE": 0}),
    ("GPUS_PER_NODE is four; set it to the ranks per node, from 1", [EXAMPLE], {"GPUS_PER_NODE": "four"}),
]
OWN_REFUSALS = [
    ("torchrun", "GPUS_PER_NODE is not set and torch sees no GPU; ", {}),
    ("torchrun", "NNODES is 0; ", {"NNODES": 0}),
    ("torchrun", "MASTER_ADDR is not set; with 2 nodes it names one", {"NNODES": 2, "GPUS_PER_NODE": 1}),
    ("elastic", "NNODES is 2-4; set it to the fewest and most nodes, as 2:4", {"NNODES": "2-4"}),
    ("elastic", "NNODES is 4:2; the fewest nodes come first", {"NNODES": "4:2"}),
    ("elastic", "RESTARTS is often; ", {"RESTARTS": "often", "GPUS_PER_NODE": 1}),
    ("elastic", "GATHERING is 0; ", {"GATHERING": 0, "GPUS_PER_NODE": 1}),
    ("elastic", "MASTER_ADDR is not set; with 1:2 nodes it names one", {"NNODES": "1:2", "GPUS_PER_NODE": 1}),
    ("deepspeed", "GPUS_PER_NODE is not set and torch sees no GPU; ", {}),
    ("deepspeed", "there is no hostfile nowhere; write one line NAME slots=GPUS", {"HOSTFILE": "nowhere"}),
    ("deepspeed", "NNODES is 2, but HOSTFILE is not set", {"NNODES": 2, "GPUS_PER_NODE": 1}),
    ("slurm", "GPUS_PER_NODE is not set and Slurm gave no GPU; ", {"SLURM_JOB_NODELIST": "gpu7"}),
    ("slurm", "SLURM_JOB_NODELIST is not set; submit with sbatch launch/slurm.sh SCRIPT", {"GPUS_PER_NODE": 1}),
]


@pytest.mark.parametrize(
    ("launcher", "message", "words", "settings"),
    [
        *((launcher, *refusal) for launcher in ("torchrun", "elastic", "deepspeed", "slurm") for refusal in REFUSALS),
        *((launcher, message, [EXAMPLE], settings) for launcher, message, settings in OWN_REFUSALS),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(launcher, message, words, settings):
    if launcher == "slurm" and words == [EXAMPLE] and "GPUS_PER_NODE" in message:
        settings = {"SLURM_JOB_NODELIST": "gpu7", **settings}
    done = start(launcher, *words, **settings)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{launcher}.sh: {message}")


@pytest.mark.parametrize("launcher", ["torchrun", "elastic", "deepspeed", "slurm"])
def test_help_is_the_header(launcher):
    done = start(launcher, "--help")
    assert done.returncode == 0
    assert f"launch/{launcher}.sh" in done.stdout and "GPUS_PER_NODE" in done.stdout and "#" not in done.stdout


@pytest.mark.slow
def test_a_script_trains_on_two_ranks_of_one_node(tmp_path):
    config = tmp_path / "ds config.json"
    config.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 4,
                "zero_optimization": {"stage": 3},
                "ds_lgamp": {},
            }
        )
    )
    done = start(
        *("torchrun", EXAMPLE, "--stages", 2, "--deepspeed_config", config),
        **{"GPUS_PER_NODE": 2, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": 1},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "RESULT LgampEngine" in done.stdout
