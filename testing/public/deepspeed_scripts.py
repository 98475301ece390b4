"""Runs training scripts that use DeepSpeed on ranks of this machine, and returns the losses of rank 0."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testing.in_host import LOSSES
from testing.launching import ON_CPU, ROOT, torchrun

STAND_INS = ROOT / "testing" / "stand_ins"


def host_environment(ranks: int, **variables: str) -> dict[str, str]:
    """Returns an environment for processes, with the changes of testing/in_host.py."""
    return {
        **ON_CPU,
        **{"PYTHONPATH": f"{STAND_INS}:{ROOT}", "LOCAL_SIZE": str(ranks), "DS_IGNORE_CUDA_DETECTION": "1"},
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
