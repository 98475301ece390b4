"""``ds_lgamp env``: shows what is installed and whether ds_lgamp can work with it."""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from ds_lgamp.autoload import waits
from ds_lgamp.version import __version__

_DISTRIBUTIONS = {
    "torch": ("torch",),
    "deepspeed": ("deepspeed",),
    "megatron-core": ("megatron-core",),
    "transformers": ("transformers",),
    "pydantic": ("pydantic",),
    "transformer-engine": ("transformer-engine", "transformer-engine-torch"),
}
_OLDEST_TORCH = (2, 6)
_ABSENT = "not installed"


@dataclass
class Environment:
    """The result of the inspection."""

    versions: dict[str, str] = field(default_factory=dict)
    """Version of each package, or a few words if it has none."""
    accelerator: str = "unknown"
    communication_backend: str = "unknown"
    """The backend that DeepSpeed chooses for the accelerator."""
    backends: dict[str, bool] = field(default_factory=dict)
    """Whether torch was built with each backend."""
    hook: str = "unknown"
    """Whether a process needs nothing but a block, or why not."""
    devices: list[str] = field(default_factory=list)
    """GPUs with their memory."""
    seams: dict[str, bool] = field(default_factory=dict)
    """Whether the installed DeepSpeed has each part that ds_lgamp overrides, calls or reads."""
    missing_megatron_seams: list[str] | None = None
    """Parts that Megatron-LM's scripts need and the installed Megatron-core lacks; None without Megatron-core."""
    untested: list[str] = field(default_factory=list)
    """Packages with which ds_lgamp has not been tested, each with its version and the tested ones."""
    problem: str | None = None
    """The problem and its fix; None if ds_lgamp is ready."""


def run_env(as_json: bool, output: TextIO) -> int:
    """Writes the report to ``output``. Returns 0 if ds_lgamp is ready, else 1."""
    found = inspect_environment()
    if as_json:
        output.write(json.dumps({**asdict(found), "ready": found.problem is None}) + "\n")
    else:
        output.write(_as_text(found))
    return 0 if found.problem is None else 1


def inspect_environment() -> Environment:
    """Inspects the interpreter's packages and the machine's devices. Imports torch and DeepSpeed if they are
    installed."""
    found = Environment()
    found.versions = {"python": platform.python_version(), "ds_lgamp": __version__}
    for name, distributions in _DISTRIBUTIONS.items():
        found.versions[name] = next(filter(None, map(_version, distributions)), _ABSENT)
    found.versions["apex"] = _apex()
    for name in ("torch", "deepspeed"):
        if not _import(name, found):
            return found
    _look_at_torch(found)
    _look_at_deepspeed(found)
    if found.versions["megatron-core"] != _ABSENT:
        _look_at_megatron(found)
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _apex() -> str:
    """Finds NVIDIA's apex, which has fused optimizers. Another project on PyPI is also called apex."""
    if importlib.util.find_spec("apex") is None:
        return _ABSENT
    version = _version("apex") or "unknown version"
    try:
        importlib.import_module("apex.optimizers").FusedAdam  # noqa: B018
    except Exception:
        return f"{version}, not NVIDIA's"
    return version if importlib.util.find_spec("amp_C") is not None else f"{version}, without its kernels (amp_C)"


def _import(name: str, found: Environment) -> bool:
    try:
        importlib.import_module(name)
    except Exception as error:
        from ds_lgamp.integrations.deepspeed.hook.deepspeed_seams import TESTED_VERSION

        fix = f"pip install deepspeed=={TESTED_VERSION}" if name == "deepspeed" else "install torch 2.6 or newer"
        if found.versions[name] == _ABSENT:
            found.problem = f"{name} is not installed; {fix}"
        else:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            found.problem = f"{name} {found.versions[name]} cannot be imported ({reason}); {fix}"
        return False
    return True


def _look_at_torch(found: Environment) -> None:
    import torch
    import torch.distributed as dist

    available = dist.is_available()
    found.backends = {
        "gloo": available and dist.is_gloo_available(),
        "nccl": available and dist.is_nccl_available(),
    }
    found.hook = _hook()
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found.devices.append(f"{device.name}, {device.total_memory / 1e9:.0f} GB")
    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST_TORCH:
        found.problem = f"torch {torch.__version__} is too old; install torch 2.6 or newer"
    elif not any(found.backends.values()):
        found.problem = "torch has neither gloo nor nccl; install a build of torch with torch.distributed"


def _hook() -> str:
    if waits():
        return "yes, in every process that imports torch"
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return "no, because TORCH_DEVICE_BACKEND_AUTOLOAD is 0; unset it, or start scripts by ds_lgamp run"
    return "no, because the entry point of this package is missing; install ds_lgamp again"


def _look_at_deepspeed(found: Environment) -> None:
    from deepspeed.accelerator import get_accelerator

    from ds_lgamp.config import ConfigError
    from ds_lgamp.integrations.deepspeed.hook.deepspeed_seams import (
        TESTED_VERSION,
        all_seams,
        check_seams,
        missing_seams,
    )

    _note_untested("deepspeed", [TESTED_VERSION], found)
    accelerator: Any = get_accelerator()
    found.accelerator = accelerator.device_name()
    found.communication_backend = accelerator.communication_backend_name()
    missing = missing_seams()
    found.seams = {seam: seam not in missing for seam in all_seams()}
    try:
        check_seams()
    except ConfigError as error:
        found.problem = found.problem or str(error)
    if found.backends.get(found.communication_backend) is False:
        found.problem = found.problem or (
            f"the accelerator is {found.accelerator}, but torch has no {found.communication_backend}; "
            "install another build of torch or set DS_ACCELERATOR=cpu"
        )


def _look_at_megatron(found: Environment) -> None:
    from ds_lgamp.config import ConfigError
    from ds_lgamp.integrations.megatron.loop.megatron_seams import TESTED_VERSIONS, check_seams, missing_seams

    _note_untested("megatron-core", TESTED_VERSIONS, found)
    with warnings.catch_warnings():
        # Megatron-core warns about optional packages.
        warnings.simplefilter("ignore")
        found.missing_megatron_seams = missing_seams()
        try:
            check_seams()
        except ConfigError as error:
            found.problem = found.problem or str(error)


def _note_untested(name: str, tested: Sequence[str], found: Environment) -> None:
    if found.versions[name] not in tested:
        found.untested.append(f"{name} {found.versions[name]}, but {', '.join(tested)} were tested")


def _as_text(found: Environment) -> str:
    rows = list(found.versions.items())
    if found.backends:
        backends = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in found.backends.items())
        rows.append(("accelerator", f"{found.accelerator} ({found.communication_backend}; torch has {backends})"))
        rows.append(("a block is enough", found.hook))
        rows.append(("GPUs", "; ".join(found.devices) or "none"))
    if found.seams:
        missing = [seam for seam, there in found.seams.items() if not there]
        rows.append(("DeepSpeed seams", f"{len(found.seams) - len(missing)} of {len(found.seams)} found"))
        rows += [("", f"missing: {seam}") for seam in missing]
    if found.missing_megatron_seams is not None:
        rows.append(("Megatron seams", f"{len(found.missing_megatron_seams) or 'none'} missing"))
        rows += [("", f"missing: {seam}") for seam in found.missing_megatron_seams]
    rows += [("untested", text) for text in found.untested]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}" for name, value in rows]
    lines += ["", "ready" if found.problem is None else f"not ready: {found.problem}"]
    return "\n".join(lines) + "\n"
