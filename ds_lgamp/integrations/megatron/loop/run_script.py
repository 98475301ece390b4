"""A block for a Megatron-LM script, unedited, inside Megatron-LM's own training loop: by ``ds_lgamp run``, or by what a
process gets that imports this loop."""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ds_lgamp.autoload import wait_for_no_host
from ds_lgamp.config import BLOCK, ConfigError, read_block
from ds_lgamp.integrations.cluster_file import with_speeds
from ds_lgamp.integrations.megatron.loop.flags import CHUNK_FLAGS, LAYOUT, RANK_FLAGS, option_of
from ds_lgamp.integrations.user_script import (
    end_well,
    failures_end_the_process,
    find_modules_beside,
    leave,
    run_as_main,
    say_without_effect,
)

OPTION, VARIABLE = "--ds-lgamp-config", "DS_LGAMP_CONFIG"


def split_option(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Returns the configuration file that the command line or the environment names, and the rest of the command line.

    Raises ConfigError if the option has no value.
    """
    path, rest, words = os.environ.get(VARIABLE) or None, [], iter(arguments)
    for word in words:
        name, _, value = word.partition("=")
        if name != OPTION:
            rest.append(word)
            continue
        path = value or next(words, "")
        if not path:
            raise ConfigError(f"{OPTION} has no value; name the configuration file")
    return path, rest


def run_script(script: str, arguments: Sequence[str], path: str, keys: dict[str, Any]) -> NoReturn:
    """Runs ``script`` as ``__main__`` with the block of the file at ``path``, and ends the process with it.

    Args:
        keys: what takes the place of keys of the block.
    """
    wait_for_no_host()
    with failures_end_the_process():
        find_modules_beside(script)
        if not install_block(path, arguments, keys) and keys and os.environ.get("RANK", "0") == "0":
            say_without_effect(keys)
        run_as_main(script, arguments)
    leave()


def imported(_training: ModuleType) -> None:
    """Installs the block of the file that the command line or the environment names, if any. The script never sees the
    option.

    A ConfigError ends the process with its sentence. So do later errors that the script does not catch, so that the
    launcher ends the job.
    """
    with failures_end_the_process():
        path, sys.argv[1:] = split_option(sys.argv[1:])
        if path is not None and install_block(path, sys.argv[1:], {}):
            end_well(ExitStack())


def install_block(path: str, arguments: Sequence[str], keys: dict[str, Any]) -> bool:
    """Lets Megatron-LM's training loop follow the block of the file at ``path``. Returns whether it is enabled.

    Args:
        arguments: the command line of the script.
        keys: what takes the place of keys of the block.
    """
    config = _with_cluster(read_config(path), arguments)
    if isinstance(config[BLOCK], dict):
        config[BLOCK] |= keys
    settings = read_block(config)
    if settings is None:
        return False
    # These imports come late, because megatron.core may lie beside the script.
    from ds_lgamp.integrations.megatron.loop.megatron_seams import check_seams, check_training_seams

    check_seams()
    check_training_seams()
    from ds_lgamp.integrations.megatron.loop.arguments import check_file
    from ds_lgamp.integrations.megatron.loop.install import install_training

    install_training(check_file(config, settings))
    return True


def _with_cluster(config: dict[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """Adds the speeds that the cluster file of ``ds_lgamp run --cluster`` knows, unless a flag cuts the layers."""
    # torch is imported late, as everything that Megatron-LM may want to prepare for.
    from ds_lgamp.watch.this_rank import this_rank

    options = tuple(map(option_of, (LAYOUT, *CHUNK_FLAGS, *RANK_FLAGS)))
    cuts = any(argument.startswith(options) for argument in arguments)
    return config if cuts else with_speeds(config, this_rank.assignment, replicas=False)


def read_config(path: str) -> dict[str, Any]:
    """Returns what the configuration file holds. Raises ConfigError if it has no block."""
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{OPTION} {path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{OPTION} {path} holds {type(config).__name__}; it must hold an object")
    if BLOCK not in config:
        raise ConfigError(f"{OPTION} {path} has no {BLOCK} block; add one, such as {{}}")
    return config
