"""Runs training scripts that use DeepSpeed on ranks of this machine, and returns the losses of rank 0."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ds_lgamp.config import BLOCK
from testing.in_host import LOSSES
from testing.launching import ON_CPU, ROOT, recorded, run, torchrun

AT_START = f"{ROOT / 'testing' / 'at_start'}:{ROOT}"
"""The path of modules for processes that testing/in_host.py changes."""
STAND_INS = ROOT / "testing" / "stand_ins" / "images"


def numbers_of(
    launch: Callable[[Path], Sequence[str]],
    config: Mapping[str, Any],
    folder: Path,
    variables: Mapping[str, str] = {},
    seconds: float = 600,
) -> list[float]:
    """Trains in ``folder`` by a launch line of the script's own, to which a block alone is added. Returns what
    testing/in_host.py records, in the mean of all ranks.

    Args:
        launch: returns the launch line, given the path of the configuration.
        config: the configuration.
        folder: where to run; takes the configuration and a trace, which proves that the block counted.
        variables: more of the environment.
        seconds: the time limit.

    Raises AssertionError with the output of a run that fails or takes longer.
    """
    with tempfile.TemporaryDirectory() as losses, tempfile.TemporaryDirectory() as record:
        block = {BLOCK: {**config[BLOCK], "trace": record, "trace_steps": "1:99"}} if BLOCK in config else {}
        path = folder / "ds_config.json"
        path.write_text(json.dumps({**config, **block}))
        environment = {**ON_CPU, "PYTHONPATH": AT_START, "DS_IGNORE_CUDA_DETECTION": "1", LOSSES: losses, **variables}
        run(launch(path), seconds, environment, folder)
        assert not block or recorded(Path(record)), "the script trained, but not with the block"
        ranks = [[float(line) for line in file.read_text().splitlines()] for file in Path(losses).iterdir()]
        return [fmean(numbers) for numbers in zip(*ranks, strict=True)]


def host_environment(ranks: int, **variables: str) -> dict[str, str]:
    """Returns an environment for processes, with the changes of testing/in_host.py."""
    return {
        **ON_CPU,
        **{"PYTHONPATH": f"{STAND_INS}:{AT_START}", "LOCAL_SIZE": str(ranks), "DS_IGNORE_CUDA_DETECTION": "1"},
        **variables,
    }


def losses_of(
    script: Path, ranks: int, flags: Sequence[str], config: Mapping[str, Any], seconds: float = 240
) -> list[float]:
    """Trains with ``config`` as the --deepspeed_config. Uses ``ds_lgamp run`` if ``config`` has a block. Returns the
    losses of rank 0.

    Raises AssertionError with the output of a run that fails or takes longer than ``seconds``.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ds_config.json")
        path.write_text(json.dumps(config))
        launcher = ["-m", "ds_lgamp", "run"] if "ds_lgamp" in config else []
        words = [*launcher, str(script), *flags, "--deepspeed_config", str(path)]
        torchrun(ranks, words, seconds, host_environment(ranks, **{LOSSES: folder}))
        return [float(line) for line in Path(folder, "0").read_text().splitlines()]
