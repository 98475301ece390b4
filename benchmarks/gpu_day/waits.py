"""Finds where the host waits for the device in a training step, by torch's debug mode for synchronising operations.

torch says that the mode does not cover everything, operations of torch.distributed among them. The trace of a step
shows those: ``benchmarks.gpu_day.trace``.
"""

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpt.contenders import Layered
from benchmarks.gpu_day.equality import device
from benchmarks.record import ROOT

WARNING = "called a synchronizing CUDA operation"
"""What torch warns of in this mode."""

Place = tuple[str, str]
"""The action of the step, and the innermost line of this project with that line's text."""


def waits_in_a_step(training: Layered) -> dict[str, Any]:
    """Trains one step in which every wait is noted and, if there was none, another one in which a wait is an error.

    After an error the training cannot go on. Its text names the action.
    """
    if device().type != "cuda":
        return {"host waits": f"not available on {device().type}"}
    with noted_waits(training) as found:
        training.step()
    waits = [{"action": action, "at": line, "times": times} for (action, line), times in found.items()]
    if waits:
        first = waits[0]
        return {"host waits": waits, "failure": f"the host waits in a step, first in {first['action']}: {first['at']}"}
    try:
        with debug_mode("error"):
            training.step()
    except RuntimeError as error:
        return {"host waits": waits, "failure": f"a step that may not wait: {error}"}
    return {"host waits": waits}


@contextmanager
def noted_waits(training: Layered) -> Iterator[Counter[Place]]:
    """Counts waits by place."""
    found: Counter[Place] = Counter()
    with warnings.catch_warnings(), debug_mode("warn"):
        warnings.simplefilter("always")
        show = warnings.showwarning

        def note(message: Warning | str, *where: Any, **named: Any) -> None:
            if WARNING not in str(message):
                return show(message, *where, **named)
            action = training.engine.lgamp.executor.current
            found["no action" if action is None else str(action), innermost_line()] += 1

        warnings.showwarning = note
        yield found


@contextmanager
def debug_mode(mode: str) -> Iterator[None]:
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def innermost_line() -> str:
    """Where the warning comes from in ds_lgamp, or else at all: the stacks of autograd's threads need not have a line
    of ds_lgamp."""
    stack = [frame for frame in traceback.extract_stack() if frame.filename not in (__file__, warnings.__file__)]
    own = [frame for frame in stack if frame.filename.startswith(str(ROOT / "ds_lgamp"))]
    frame = (own or stack)[-1]
    path = frame.filename.removeprefix(f"{ROOT}/")
    return f"{path}:{frame.lineno} in {frame.name}: {frame.line}"
