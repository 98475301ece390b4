"""Copies the installed hosts and applies ``patches/`` to the copies. ``pytest --patched`` runs tests with them."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import distribution, version
from pathlib import Path

from testing import ROOT

PATCHES = ROOT / "patches"
PACKAGES = {"deepspeed": "deepspeed", "megatron-core": "megatron"}
"""The package of each distribution."""
CODE_ALONE = "--exclude=tests/*"
"""The option of ``git apply`` for installed hosts, which have no tests."""


def patch_folders() -> list[Path]:
    """Returns the folders of ``patches/``. Each has the patches for one version of a distribution, and both in its
    name."""
    return sorted(folder for folder in PATCHES.iterdir() if folder.is_dir())


def misfit(folder: Path) -> str:
    """Says which version is installed instead of that of ``folder``. Empty if the patches fit."""
    name, patched = folder.name.rsplit("-", 1)
    installed = version(name)
    return "" if installed == patched else f"{name} {installed} is installed, the patches are for {patched}"


def other_versions() -> str:
    """Describes the installed versions that no folder of patches is for. Empty if there are patches for all."""
    folders = {name: [folder for folder in patch_folders() if folder.name.startswith(f"{name}-")] for name in PACKAGES}
    unfit = [each for each in folders.values() if all(map(misfit, each))]
    return "; ".join(misfit(folder) for each in unfit for folder in each)


def copy_host(patches: Path, target: Path) -> None:
    """Copies the installed host of a folder of patches into ``target``."""
    name, _ = patches.name.rsplit("-", 1)
    package = PACKAGES[name]
    shutil.copytree(Path(str(distribution(name).locate_file(package))), target / package)


def apply_patch(patch: Path, target: Path, choice: str) -> None:
    """Applies to ``target`` what ``choice``, an option of ``git apply``, leaves of a patch. Fails if it is off by a
    line."""
    # Inside the repository of a parent folder, git would silently apply nothing.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(target.resolve().parent)}
    command = ["git", "apply", "--verbose", choice, str(patch)]
    done = subprocess.run(command, cwd=target, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "offset" not in done.stderr, done.stderr


def copy_patched(patches: Path, target: Path) -> None:
    """Copies the installed host of a folder of patches into ``target`` and applies them there, but for their tests."""
    copy_host(patches, target)
    for patch in sorted(patches.glob("*.patch")):
        apply_patch(patch, target, CODE_ALONE)


def use_patched(folder: Path) -> None:
    """Puts patched copies in ``folder`` ahead of the installed hosts, for this process and its children."""
    assert not {"deepspeed", "megatron"} & set(sys.modules)
    for patches in patch_folders():
        if not misfit(patches):
            copy_patched(patches, folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
