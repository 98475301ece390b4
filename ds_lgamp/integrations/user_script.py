"""Runs a user's script, unedited."""

import runpy
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ds_lgamp.config import BLOCK, ConfigError


def find_modules_beside(script: str) -> None:
    """Lets imports look beside ``script`` first, as when Python runs it. Raises ConfigError if there is no such
    file."""
    if not Path(script).is_file():
        raise ConfigError(f"'{script}' is no file; name the script to run")
    sys.path[0] = str(Path(script).resolve().parent)


def run_as_main(script: str, arguments: Sequence[str]) -> None:
    """Runs ``script`` as Python would. Raises SystemExit only if the script exits with a failing status."""
    sys.argv = [script, *arguments]
    find_modules_beside(script)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code:
            raise


def say_without_effect(keys: Iterable[str]) -> None:
    """Says that the options of the command line for these keys of the block have no effect, because none is enabled."""
    given = " and ".join(f"--{key.replace('_', '-')}" for key in keys)
    print(f"ds_lgamp: {given} without effect: no {BLOCK} block is enabled", file=sys.stderr)
