"""Makes an environment for every combination of versions, with uv, which shares packages between them."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from testing.launching import ROOT

CONSTRAINTS = ROOT / "launch" / "constraints.txt"
EXTRAS = "megatron,transformers,plot,test,dev"
_WHERE = "import sys; print(sys.executable)"


class Versions(NamedTuple):
    """Versions of Python, torch and DeepSpeed, such as 3.12, 2.13 and 0.19.8, and of other packages that are not the
    pinned ones, such as transformers==5.24.0."""

    python: str
    torch: str
    deepspeed: str
    others: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        others = "".join(f"-{requirement.replace('==', '')}" for requirement in self.others)
        return f"python{self.python}-torch{self.torch}-deepspeed{self.deepspeed}{others}"


def environment(versions: Versions, folder: Path, torch_index: str | None = None) -> Path:
    """Returns the interpreter of an environment with these versions and the pinned ones of all other packages. An
    environment that was completed before is used again.

    Args:
        folder: holds the environments.
        torch_index: where torch is downloaded from; default PyPI.

    Raises SystemExit if uv or the interpreter is missing, and CalledProcessError if a package cannot be installed.
    """
    uv = shutil.which("uv")
    if uv is None:
        raise SystemExit("uv cannot be found; pip install uv")
    venv, python = folder / versions.name, folder / versions.name / "bin" / "python"
    complete, pins = venv / "complete", venv / "constraints.txt"
    if complete.exists():
        return python
    _run(uv, "venv", "--quiet", "--clear", "--python", interpreter(versions.python, uv), venv)
    pins.write_text("\n".join(pins_beside(versions)))
    install = (uv, "pip", "install", "--quiet", "--python", python, "--constraint", pins)
    _run(*install, *(["--default-index", torch_index] if torch_index else []), f"torch=={versions.torch}.*")
    # ds_lgamp itself comes from the checkout. Its metadata refuse versions that may be tried here.
    requirements = venv / "requirements.txt"
    requirements.write_text("\n".join(requirements_of_tests(versions)))
    _run(*install, "--compile-bytecode", "--requirement", requirements)
    _run(*install, "--no-deps", "--editable", ROOT)
    complete.touch()
    return python


def pins_beside(versions: Versions) -> list[str]:
    """The pins of launch/constraints.txt, less those of packages whose versions vary."""
    return _others(CONSTRAINTS.read_text().splitlines(), versions)


def requirements_of_tests(versions: Versions) -> list[str]:
    """What ds_lgamp and its tests require beside torch, as in pyproject.toml, but in the versions to be tried."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [name for extra in EXTRAS.split(",") for name in project["optional-dependencies"][extra]]
    tried = [*versions.others, f"deepspeed=={versions.deepspeed}"]
    return [*_others([*project["dependencies"], *extras], versions), *tried]


def _others(requirements: Iterable[str], versions: Versions) -> list[str]:
    """Returns the requirements of packages that ``versions`` does not name."""
    named = {"torch", "deepspeed", *map(_package, versions.others)}
    return [requirement for requirement in requirements if _package(requirement) not in named]


def _package(requirement: str) -> str:
    """The package of a requirement such as torch>=2.6; none of a comment."""
    return re.match(r"[\w.-]*", requirement).group()


def interpreter(version: str, uv: str) -> str:
    """Returns the path of Python ``version``, from the search path, pyenv or uv. Raises SystemExit if none has it."""
    for command in (
        [f"python{version}", "-c", _WHERE],
        ["pyenv", "prefix", version],
        [uv, "python", "find", "--no-python-downloads", version],
    ):
        if shutil.which(command[0]) is None:
            continue
        # pyenv puts a python3.12 on the search path that fails where another version is active.
        found = subprocess.run(command, capture_output=True, text=True)
        if found.returncode == 0:
            path = Path(found.stdout.strip())
            return str(path / "bin" / "python" if path.is_dir() else path)
    raise SystemExit(f"Python {version} cannot be found; install it, or leave it out with --pythons")


def _run(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)
    subprocess.run(list(map(str, words)), check=True)
