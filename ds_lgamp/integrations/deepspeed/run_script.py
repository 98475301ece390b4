"""``ds_lgamp run``: a user's script, unedited, with the engine installed."""

import json
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from ds_lgamp.config import ConfigError, read_block
from ds_lgamp.integrations.deepspeed.install import install
from ds_lgamp.integrations.deepspeed.measured import TrainingMeasurement

_FAILED, _REFUSED = 1, 2


def run_script(script: str, arguments: Sequence[str], measure: str | None = None) -> int:
    """Runs ``script`` as ``__main__``; returns the exit status.

    A failure ends the process at once, without the interpreter's orderly exit, which could wait for ranks that wait for
    this one: so the launcher notices and ends the job.
    """
    try:
        _check_config(arguments)
        install()
        measurement = TrainingMeasurement()
        if measure is not None:
            measurement.install()
        sys.argv = [script, *arguments]
        sys.path.insert(0, str(Path(script).resolve().parent))
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as leaving:
            if leaving.code:
                raise
        if measure is not None:
            measurement.write(Path(measure))
    except ConfigError as error:
        _leave(f"ds_lgamp: {error}\n", _REFUSED)
    except Exception:
        _leave(traceback.format_exc(), _FAILED)
    return 0


def _check_config(arguments: Sequence[str]) -> None:
    """Refuses a faulty block in a ``--deepspeed_config`` on the command line before anything starts."""
    for index, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == "--deepspeed_config":
            path = Path(value or next(iter(arguments[index + 1 : index + 2]), ""))
            if path.is_file():
                try:
                    read_block(json.loads(path.read_text()))
                except json.JSONDecodeError as error:
                    raise ConfigError(f"{path} is no JSON: {error}") from None


def _leave(message: str, status: int) -> None:
    sys.stdout.flush()
    sys.stderr.write(message)
    sys.stderr.flush()
    os._exit(status)
