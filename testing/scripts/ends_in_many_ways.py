"""Ends in each of the ways that its arguments name, each in its own process.

The first argument is a folder. It receives the output and the exit status of each process.
"""

import atexit
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import ds_lgamp
from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.hook.initialize import watch_the_process
from ds_lgamp.watch import last_words
from ds_lgamp.watch.this_rank import this_rank

folder, *ways = sys.argv[1:]
way = None
for each in ways:
    child = os.fork()
    if child == 0:
        way = each
        break
    _, status = os.waitpid(child, 0)
    Path(folder, f"{each}.status").write_text(str(os.waitstatus_to_exitcode(status)))


def own_hook(kind, error, trace):
    print("OWN HOOK", file=sys.stderr)
    sys.__excepthook__(kind, error, trace)


def later_hook(kind, error, trace):
    print("LATER HOOK", file=sys.stderr)
    installed_hook(kind, error, trace)


class Shutdown:
    """Says that the interpreter shuts down in order."""

    def __del__(self):
        os.write(1, b"ORDERLY EXIT\n")


def wait_for_ever():
    print("WAITS", flush=True)
    time.sleep(1000)


if way is not None:
    printed = os.open(Path(folder, way), os.O_CREAT | os.O_WRONLY)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    shutdown = Shutdown()
    atexit.register(print, "EXIT HANDLER")
    log = open(Path(folder, f"{way}.log"), "w")
    log.write("the last line")
    if way == "handler waits":
        last_words.SECONDS = 1.0
        atexit.register(wait_for_ever)
    if way == "own hook":
        sys.excepthook = own_hook
    ds_lgamp.install()
    watch_the_process()
    installed_hook = sys.excepthook
    if way != "before init":
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1 if way == "alone" else 2)
    if way == "later hook":
        sys.excepthook = later_hook
    if way == "uninstalled":
        ds_lgamp.uninstall()
    if way == "refused":
        raise ConfigError("schedule is 'layerd'; use 'layered'")
    if way == "interrupted":
        raise KeyboardInterrupt
    if way == "exit":
        sys.exit(3)
    if way == "failed save":

        def finish() -> None:
            raise CheckpointError("step3 could not be saved")

        this_rank.agreements[finish] = None
        sys.exit()
    try:
        raise ArithmeticError("the script is in trouble")
    except ArithmeticError:
        if way != "caught":
            raise
        sys.excepthook(*sys.exc_info())
