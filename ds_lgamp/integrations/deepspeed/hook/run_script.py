"""``ds_lgamp run``: a user's script, unedited, with the engine installed."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from ds_lgamp.config import BLOCK, ConfigError, read_block
from ds_lgamp.integrations.deepspeed.config.check_keys import check_keys
from ds_lgamp.integrations.deepspeed.hook.seams import check_seams
from ds_lgamp.integrations.ending import failures_end_the_process, leave
from ds_lgamp.integrations.user_script import run_as_main

_STOCK_REFUSAL = "must divide distributed world size"
"""What PipelineModule says of a number of stages that does not fit, before any engine is asked for."""


def run_script(script: str, arguments: Sequence[str], measure: str | None = None) -> NoReturn:
    """Runs ``script`` as ``__main__``, and ends the process with it."""
    with failures_end_the_process(_STOCK_REFUSAL):
        check_seams()
        _check_config(arguments)
        # Only now: of another DeepSpeed, imports fail.
        from ds_lgamp.integrations.deepspeed.explain.measured import TrainingMeasurement
        from ds_lgamp.integrations.deepspeed.hook.compiling import compile_no_collective
        from ds_lgamp.integrations.deepspeed.hook.install import install

        compile_no_collective()
        install()
        measurement = TrainingMeasurement()
        if measure is not None:
            measurement.install()
        run_as_main(script, arguments)
        if measure is not None:
            measurement.write(Path(measure))
    leave()


def explain_script(script: str, arguments: Sequence[str], ranks: int | None, as_json: bool, output: TextIO) -> int:
    """Runs ``script`` up to ``deepspeed.initialize``, in this process alone, and writes to ``output`` what its block
    would do; returns the exit status.

    Args:
        ranks: how many the job would have; None takes ``WORLD_SIZE``, else 1.
        as_json: the same facts for a program to read.
    """
    world_size = ranks if ranks is not None else int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if rank >= world_size:
        return 0
    hint = (
        f"ds_lgamp: the script failed ahead of deepspeed.initialize; it ran on {world_size} imagined ranks (--ranks), "
        "whose collectives move nothing\n"
    )
    with failures_end_the_process(_STOCK_REFUSAL, hint):
        check_seams()
        _check_config(arguments)
        from ds_lgamp.integrations.deepspeed.explain.explain import explain_engines
        from ds_lgamp.integrations.deepspeed.explain.facts import Explanation, json_text
        from ds_lgamp.integrations.deepspeed.explain.imagined import imagine_ranks
        from ds_lgamp.integrations.deepspeed.explain.text import as_text

        explained = []

        def show(explanation: Explanation) -> None:
            explained.append(explanation)
            if rank == 0:
                output.write(json_text(explanation) if as_json else as_text(explanation))
                output.write("\n")
                output.flush()

        imagine_ranks(world_size, rank)
        explain_engines(show)
        try:
            run_as_main(script, arguments)
        except (Exception, SystemExit):
            # What a script does on its way out, without an engine, is of no interest.
            if not explained:
                raise
        if not explained:
            raise ConfigError(f"{script} ended without initialising an engine with a {BLOCK} block: nothing to explain")
    return 0


def _check_config(arguments: Sequence[str]) -> None:
    """Refuses a faulty block in a ``--deepspeed_config`` on the command line before anything starts."""
    for index, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == "--deepspeed_config":
            config = _read_config(value or next(iter(arguments[index + 1 : index + 2]), ""))
            if read_block(config) is not None:
                check_keys(config)


def _read_config(value: str) -> dict[str, Any]:
    """The configuration as DeepSpeed reads it: a file of JSON or HJSON, or base64."""
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    try:
        config = load_ds_config(value)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--deepspeed_config {value} cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--deepspeed_config {value} holds {type(config).__name__}; it must hold an object")
    return config
