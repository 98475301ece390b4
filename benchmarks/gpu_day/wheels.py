"""Collects wheels for a machine that has torch but no network: ``python -m benchmarks.gpu_day.wheels DIR``.

Takes what ds_lgamp needs in the versions that are installed here, for Linux on x86-64. Leaves out torch, NumPy and what
torch needs.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

WANTED = ("deepspeed", "megatron-core", "pydantic", "xxhash")
THERE = ("torch", "numpy")
BUILT = ("deepspeed",)
"""Published without a wheel; its wheel is for every Python and machine, because it compiles at run time."""
GLIBC = (17, 24, 27, 28)
"""Minor versions of glibc in the names of wheels that pip may take. It matches each name exactly."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_day.wheels", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--python", default="3.12", help="version of the machine's Python; default %(default)s")
    options = parser.parse_args()
    present = set(closure(THERE, ()))
    packages = {name: f"{name}=={version(name)}" for name in closure(WANTED, present)}
    download(options.folder, [pin for name, pin in packages.items() if name not in BUILT], options.python)
    build(options.folder, [packages[name] for name in BUILT])
    print(f"{sum(path.stat().st_size for path in options.folder.glob('*.whl')) / 2**20:.1f} MiB")


def closure(names: Collection[str], left_out: Collection[str]) -> Iterator[str]:
    """Yields ``names`` and all that they need, each once, without ``left_out`` and what only that needs."""
    seen = set(left_out)
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop(0))
        if name not in seen:
            seen.add(name)
            yield name
            needed = map(Requirement, requires(name) or ())
            waiting += [need.name for need in needed if need.marker is None or need.marker.evaluate({"extra": ""})]


def download(folder: Path, pins: list[str], python: str) -> None:
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["--platform=manylinux2014_x86_64"]
    flags = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]
    pip("download", *flags, f"--dest={folder}", *pins)


def build(folder: Path, pins: list[str]) -> None:
    pip("wheel", "--no-build-isolation", f"--wheel-dir={folder}", *pins)


def pip(command: str, *words: str) -> None:
    environment = {**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, "-m", "pip", command, "--quiet", "--no-deps", *words], env=environment, check=True)


if __name__ == "__main__":
    main()
