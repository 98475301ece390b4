"""Both launchers run an unedited script. If a rank fails, the job ends and names it."""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import time
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.view.recording import read_recording
from testing import SCRIPTS
from testing.launching import free_port
from testing.ranks import run_on_ranks
from tests.slow import slow_except

SCRIPT = SCRIPTS / "public_example.py"
INSTALLS = SCRIPTS / "installs.py"
BATCH = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0}
STOCK = {**BATCH, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
LAYERED = {**BATCH, "zero_optimization": {"stage": 3}, "ds_lgamp": {}}
BIN = Path(sys.executable).parent


def torchrun(*words: str, ranks: int = 4) -> list[str]:
    return [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", str(ranks), *words]


def deepspeed(*words: str) -> list[str]:
    return [str(BIN / "deepspeed"), "--num_gpus", "4", "--master_port", str(free_port()), *words]


def launch(
    command: list[str], folder: Path, config: dict, *arguments: str, script: Path = SCRIPT
) -> subprocess.CompletedProcess:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    return start([*command, str(script), "--deepspeed_config", str(path), *arguments])


def start(command: list[str], **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=180,
        env=environment,
    )


def result_of(completed: subprocess.CompletedProcess) -> tuple[str, list[float]]:
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return result_in(completed.stdout)


def result_in(output: str) -> tuple[str, list[float]]:
    (line,) = (line for line in output.splitlines() if "RESULT" in line)
    engine, *losses = line.split("RESULT ")[1].split()
    return engine, [float(loss) for loss in losses]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launchers")
    torch.manual_seed(5)
    torch.save({"weight": torch.randn(13, 8)}, folder / "embedding.pt")
    return folder


@pytest.fixture(scope="module")
def stock(folder):
    """Returns a function that returns the losses of the script on ranks of plain DeepSpeed."""
    path = folder / "stock.json"
    path.write_text(json.dumps(STOCK))
    arguments = ["--deepspeed_config", str(path), "--checkpoint", str(folder / "embedding.pt")]

    @cache
    def on_ranks(ranks: int) -> list[float]:
        engine, losses = result_in(run_on_ranks(ranks, output_of_script, arguments)[0])
        assert engine == "PipelineEngine"
        return losses

    return on_ranks


def output_of_script(arguments: list[str]) -> str:
    """Runs the script on a rank that is started already, because a launcher's ranks take seconds to import."""
    os.environ["LOCAL_RANK"], sys.argv = str(dist.get_rank()), [str(SCRIPT), *arguments]
    # The process group is not the script's own.
    dist.destroy_process_group = lambda: None
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return output.getvalue()


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        (torchrun("-m", "ds_lgamp", "run", ranks=2), 2),
        pytest.param(torchrun("-m", "ds_lgamp", "run"), 4, marks=pytest.mark.slow),
        pytest.param(deepspeed("--module", "ds_lgamp", "run"), 4, marks=pytest.mark.slow),
    ],
    ids=["torchrun", "torchrun with data parallelism", "deepspeed"],
)
def test_an_unedited_script_trains_the_same_under_both_launchers(command, ranks, folder, stock):
    traced = ("--trace", str(folder / "trace"), "--trace-steps", "1:2")
    config = {**LAYERED, "ds_lgamp": {"trace": "nowhere", "trace_steps": "8:9"}}
    completed = launch([*command, *traced], folder, config, "--checkpoint", str(folder / "embedding.pt"))
    engine, losses = result_of(completed)
    assert engine == "LgampEngine"
    assert losses == pytest.approx(stock(ranks), rel=1e-6)
    assert f"ds_lgamp: steps 1 to 2 are recorded in {folder / 'trace'}" in completed.stderr
    assert [[step.step for step in rank.steps] for rank in read_recording(folder / "trace").ranks] == [[1, 2]] * ranks


@pytest.mark.slow
def test_a_block_alone_is_enough(folder, stock):
    completed = launch(torchrun(ranks=2), folder, LAYERED, "--checkpoint", str(folder / "embedding.pt"))
    engine, losses = result_of(completed)
    assert engine == "LgampEngine"
    assert losses == pytest.approx(stock(2), rel=1e-6)


@pytest.mark.slow
def test_without_a_block_the_script_stays_stock_to_the_bit(folder, stock):
    command = torchrun("-m", "ds_lgamp", "run")
    completed = launch([*command, "--trace", "nowhere"], folder, STOCK, "--checkpoint", str(folder / "embedding.pt"))
    assert result_of(completed) == ("PipelineEngine", stock(4))
    assert "ds_lgamp: --trace without effect: no ds_lgamp block is enabled" in completed.stderr


LAUNCHES = {
    "torchrun": (torchrun("-m", "ds_lgamp", "run"), SCRIPT),
    "deepspeed": (deepspeed("--module", "ds_lgamp", "run"), SCRIPT),
    "installed under torchrun": (torchrun(), INSTALLS),
    "installed under deepspeed": (deepspeed(), INSTALLS),
}
TROUBLES = {
    "raise": r"rank [23] \(pipeline rank 1\) failed at F3.3 of step \d: ArithmeticError: the layer is in trouble",
    "kill": r"ds_lgamp: rank [23] on \S+ died; this rank, [01] on \S+, ends .* step \d",
}
"""Each with what is said of it."""
SLOW = {("deepspeed", "kill"), ("installed under torchrun", "raise")}
"""Every launcher, every way to begin and every trouble."""


@pytest.mark.parametrize(
    ("launcher", "trouble"),
    slow_except([], list(product(LAUNCHES, TROUBLES)), several=True, slow=SLOW),
)
def test_a_failing_rank_ends_the_job_and_is_named(launcher, trouble, folder):
    """Chunk 3 is on pipeline rank 1, global ranks 2 and 3. Its twelfth forward is F3.3 of the second step."""
    (command, script), evidence = LAUNCHES[launcher], TROUBLES[trouble]
    completed = launch(command, folder, LAYERED, "--trouble", trouble, script=script)
    output = completed.stdout + completed.stderr
    assert completed.returncode != 0
    assert re.search(evidence, output), output
    trouble_began = min(float(moment) for moment in re.findall(r"TROUBLE (\S+)", output))
    assert time.time() - trouble_began < 25, "the job does not end"


@pytest.mark.slow
def test_a_faulty_block_is_refused_in_a_sentence_before_anything_starts(folder):
    config = {**LAYERED, "ds_lgamp": {"resident_chunk": 2}}
    completed = launch(torchrun("-m", "ds_lgamp", "run"), folder, config)
    assert completed.returncode != 0
    assert "ds_lgamp.resident_chunk is no known key; did you mean resident_chunks?" in completed.stderr
    assert "ConfigError" not in completed.stderr, "the error has a traceback"


@pytest.mark.parametrize("how", slow_except([], ["run", "block"], slow=["run"]))
def test_a_script_may_end_while_gloo_lets_go_of_its_tensors(how):
    """Without ds_lgamp, the processes of such a script abort."""
    before, after = {"run": (["-m", "ds_lgamp", "run"], []), "block": ([], ["--watch"])}[how]
    completed = start([*torchrun(*before), str(SCRIPTS / "ends_at_once.py"), *after])
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.count("ENDS") == 4
