"""What the processes of a job must have in common, beside the configuration: versions, environment and code."""

import hashlib
import inspect
import linecache
import os
import platform
from collections.abc import Hashable
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from ds_lgamp.partition.agreement import Term, Terms
from ds_lgamp.version import __version__

_PACKAGES = ("deepspeed", "megatron-core", "transformers")
"""Packages whose version counts where they are installed. Some ranks may import packages that other ranks do not."""
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "DS_ACCELERATOR",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Variables that change results, or the order of work on the device."""
_INSTALL, _SET = "install the same version on every rank", "set it alike on every rank"


def process_terms() -> Terms:
    """Returns the versions, variables and settings of this process."""
    terms = {
        # Releases of one minor version run the same code.
        "the version of Python": Term(".".join(platform.python_version_tuple()[:2]), _INSTALL),
        "the version of torch": Term(torch.__version__, _INSTALL),
        "the version of ds_lgamp": Term(__version__, _INSTALL),
    }
    for package in _PACKAGES:
        installed = version_of(package)
        if installed is not None:
            terms[f"the version of {package}"] = Term(installed, _INSTALL)
    if dist.is_nccl_available():
        terms["the version of NCCL"] = Term(".".join(map(str, torch.cuda.nccl.version())), _INSTALL)
    for variable in _VARIABLES:
        if variable in os.environ:
            terms[f"the variable {variable}"] = Term(repr(os.environ[variable]), _SET)
    terms["torch.get_default_dtype()"] = Term(str(torch.get_default_dtype()), _SET)
    terms["torch.backends.cuda.matmul.allow_tf32"] = Term(str(torch.backends.cuda.matmul.allow_tf32), _SET)
    return terms


@lru_cache(maxsize=len(_PACKAGES))
def version_of(package: str) -> str | None:
    """Returns the version of a package, once read; None if it is not installed."""
    with suppress(PackageNotFoundError):
        # Reads a file of hundreds of lines.
        return version(package)
    return None


def code_of(made_of: Any) -> str:
    """Returns a digest of the source of a function, or of the name of a class and all its file; "" where Python has no
    source, and for torch's own, which its version describes."""
    if (getattr(made_of, "__module__", None) or "").partition(".")[0] == "torch":
        return ""
    return _digest_of_source(made_of) if isinstance(made_of, Hashable) else ""


@lru_cache(maxsize=1024)
def _digest_of_source(made_of: Any) -> str:
    try:
        if isinstance(made_of, type):
            # To find a class in a file, inspect would parse all of it, for each of its classes anew.
            return _digest(made_of.__qualname__ + _digest_of_file(inspect.getfile(made_of)))
        return _digest(inspect.getsource(made_of))
    except (OSError, SyntaxError, TypeError):
        return ""


@lru_cache(maxsize=1024)
def _digest_of_file(file: str) -> str:
    return _digest("".join(linecache.getlines(file)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
