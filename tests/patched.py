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


def patched_versions() -> dict[str, str]:
    """Returns the versions that the patches are for, by distribution."""
    return dict(folder.name.rsplit("-", 1) for folder in sorted(PATCHES.iterdir()) if folder.is_dir())


def other_versions() -> str:
    """Describes the installed versions that differ from those of the patches. Empty if the patches fit."""
    found = {name: version(name) for name in PACKAGES}
    return ", ".join(
        f"{name} {found[name]} is installed, the patches are for {patched}"
        for name, patched in patched_versions().items()
        if found[name] != patched
    )


def copy_patched(folder: Path) -> None:
    """Copies the installed hosts into ``folder`` and applies every patch there. Fails if a patch is off by a line."""
    for name, patched in patched_versions().items():
        package = PACKAGES[name]
        shutil.copytree(Path(str(distribution(name).locate_file(package))), folder / package)
        for patch in sorted((PATCHES / f"{name}-{patched}").glob("*.patch")):
            apply = ["git", "apply", "--verbose", str(patch)]
            # Inside the repository of a parent folder, git would silently apply nothing.
            environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
            done = subprocess.run(apply, cwd=folder, env=environment, capture_output=True, text=True)
            assert done.returncode == 0 and "offset" not in done.stderr, done.stderr


def use_patched(folder: Path) -> None:
    """Puts patched copies in ``folder`` ahead of the installed hosts, for this process and its children."""
    assert not {"deepspeed", "megatron"} & set(sys.modules)
    copy_patched(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
