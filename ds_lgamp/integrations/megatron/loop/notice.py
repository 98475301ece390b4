"""Notices a block for Megatron-LM: what a process gets that imports its training loop."""

import sys
from contextlib import ExitStack
from types import ModuleType

from ds_lgamp.integrations.megatron.loop.run_script import install_block, split_option


def imported(_training: ModuleType) -> None:
    """Installs the block of the file that the command line or the environment names, if any. The script never sees the
    option.

    A ConfigError ends the process with its sentence. So do later errors that the script does not catch, so that the
    launcher ends the job.
    """
    from ds_lgamp.integrations.user_script import end_well, failures_end_the_process

    with failures_end_the_process():
        path, sys.argv[1:] = split_option(sys.argv[1:])
        if path is not None and install_block(path, sys.argv[1:], {}):
            end_well(ExitStack())
