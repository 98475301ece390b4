"""Runs Python's command lines in forks of the process that ranks come from, because importing DeepSpeed takes seconds.

What shows only in a process of its own, such as what a framework prints when it is imported, needs one.
"""

import os
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from testing import ROOT
from testing.launching import ON_CPU
from testing.ranks import CONTEXT

HANGS_AFTER = 300
"""Seconds, far more than a busy machine takes."""


class Ended(NamedTuple):
    """How a command line ended, and what it wrote to standard output and to standard error."""

    status: int
    output: str
    complaints: str


def run_module(words: Sequence[str], folder: Path = ROOT, environment: Mapping[str, str] = ON_CPU) -> Ended:
    """Does what ``python -m`` does with ``words``, in ``folder``.

    ``environment`` is added to the one of this process. Raises AssertionError if it takes minutes.
    """
    with tempfile.TemporaryDirectory() as written:
        variables = {**os.environ, **environment}
        process = CONTEXT.Process(target=_main, args=(list(words), folder, Path(written), variables))
        process.start()
        process.join(HANGS_AFTER)
        if process.exitcode is None:
            process.kill()
            process.join()
        output, complaints = (Path(written, name).read_text(errors="replace") for name in ("1", "2"))
    assert process.exitcode is not None and process.exitcode >= 0, f"hangs or was killed:\n{output}\n{complaints}"
    return Ended(process.exitcode, output, complaints)


def _main(words: list[str], folder: Path, written: Path, environment: dict[str, str]) -> None:
    import torch

    for descriptor in (1, 2):
        os.dup2(os.open(written / str(descriptor), os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    os.chdir(folder)
    # As ``python -m`` does.
    sys.path[:0] = [str(folder), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
