"""What is there: GPUs, driver, versions, and settings of the environment."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ds_lgamp.cli.environment import inspect_environment

SETTINGS = ("CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "OMP_", "DS_")
"""Beginnings of the names of environment variables that matter."""


def run(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    found = inspect_environment()
    found.seams = {seam: there for seam, there in found.seams.items() if not there}
    yield "ds_lgamp env", {**asdict(found), **({"failure": found.problem} if found.problem else {})}
    yield "variables", {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}
    yield "cuda", cuda()
    yield "nvidia-smi", {"text": nvidia_smi()}


def cuda() -> dict[str, Any]:
    """Returns versions, and each device with its memory and the devices that it can reach directly."""
    if not torch.cuda.is_available():
        return {"devices": []}
    count = torch.cuda.device_count()
    return {
        "cuda": torch.version.cuda,
        "nccl": nccl_version(),
        "devices": [
            {
                "name": torch.cuda.get_device_name(index),
                "capability": torch.cuda.get_device_capability(index),
                "free and total bytes": torch.cuda.mem_get_info(index),
                "reaches": [
                    peer for peer in range(count) if peer != index and torch.cuda.can_device_access_peer(index, peer)
                ],
            }
            for index in range(count)
        ],
    }


def device_and_nccl() -> dict[str, str]:
    """Returns the name of the first GPU and the version of NCCL; empty on a CPU."""
    if get_accelerator().device_name() != "cuda":
        return {}
    return {"accelerator": torch.cuda.get_device_name(0), "nccl": ".".join(map(str, nccl_version()))}


def nccl_version() -> tuple[int, ...]:
    """Version of the NCCL that is loaded. torch tells the one that it was built with."""
    number = ctypes.c_int()
    # By its name it is the library that is loaded already, whichever file that is.
    if ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number)) != 0:
        raise RuntimeError("NCCL does not tell its version")
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def nvidia_smi() -> str:
    """Driver, clocks, processes; why not if it cannot be run."""
    try:
        return subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
