"""``ds_lgamp run`` of a DeepSpeed script, unedited, with the engine installed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ds_lgamp.config import ConfigError, read_block
from ds_lgamp.integrations.deepspeed.config.check_keys import check_keys, without_auto
from ds_lgamp.integrations.deepspeed.hook.seams import check_seams
from ds_lgamp.integrations.user_script import failures_end_the_process, leave, run_as_main

STOCK_REFUSAL = "must divide distributed world size"
"""Words of PipelineModule's own error for a number of stages that does not divide the number of ranks."""


def run_script(
    script: str, arguments: Sequence[str], measure: str | None = None, keys: dict[str, Any] | None = None
) -> NoReturn:
    """Runs ``script`` as ``__main__``, and ends the process with it.

    Args:
        measure: the file for losses, times, traffic and memory; None measures nothing.
        keys: what takes the place of keys of the block.
    """
    with failures_end_the_process(STOCK_REFUSAL):
        check_seams()
        check_config(arguments)
        # These imports fail with a DeepSpeed that check_seams refuses.
        from ds_lgamp.integrations.deepspeed.explain.measured import TrainingMeasurement
        from ds_lgamp.integrations.deepspeed.hook.compiling import compile_no_collective
        from ds_lgamp.integrations.deepspeed.hook.install import install, pipeline_engine, plain_engine, with_keys

        compile_no_collective()
        install(*(with_keys(build, keys) if keys else build for build in (pipeline_engine, plain_engine)))
        measurement = TrainingMeasurement()
        if measure is not None:
            measurement.install()
        run_as_main(script, arguments)
        if measure is not None:
            measurement.write(Path(measure))
    leave()


def check_config(arguments: Sequence[str]) -> None:
    """Checks the file that ``--deepspeed_config`` on the command line names, before anything starts; also that of
    ``--deepspeed``, which is an option of transformers' Trainer and a flag of other scripts.

    Raises ConfigError if the file cannot be read, or if its block is enabled and faulty.
    """
    for index, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        value = value or next(iter(arguments[index + 1 : index + 2]), "")
        if name == "--deepspeed_config":
            config = _read_config(name, value)
            if read_block(config) is not None:
                check_keys(config)
        elif name == "--deepspeed" and Path(value).is_file():
            config = _read_config(name, value)
            if read_block(config) is not None:
                check_keys(without_auto(config))


def _read_config(name: str, value: str) -> dict[str, Any]:
    """The configuration as DeepSpeed reads it: a file of JSON or HJSON, or base64."""
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    try:
        config = load_ds_config(value)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} {value} cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{name} {value} holds {type(config).__name__}; it must hold an object")
    return config
