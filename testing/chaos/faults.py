"""What can happen to a rank, and how its job must end then."""

import socket
from typing import NamedTuple

HOST = socket.gethostname()
HANG_TIMEOUT = 8.0
DEATH, STALL, SUCCESS = 15.0, HANG_TIMEOUT + 15.0, 240.0
"""Seconds from a fault in which all ranks that can end have ended."""
STEPS = 8


class Fault(NamedTuple):
    """How a job must end that meets it."""

    seconds: float | None
    """From the fault; None if the job must succeed."""
    says: str
    """What must be printed, as a pattern. ``{rank}`` is the rank with the fault, ``{other}`` the one at the other end
    of its link. "" if nobody is to blame."""
    places: tuple[str, ...]
    """Where a rank may meet it."""


IN_BATCH = "forward", "data", "between steps", "evaluation"
"""Elsewhere ranks may take their time, as long as they answer."""
ANYWHERE = *IN_BATCH, "save", "load"
AT_ANY_MOMENT = *ANYWHERE, "any moment"
DIED = rf"rank {{rank}} on {HOST} died|rank {{rank}} \(pipeline rank \d\) failed"
SILENT = r"rank {rank}(, which would know why,)? does not answer since "
STANDS = rf"{SILENT}|rank {{rank}} stands "
DOWN = "the link between ranks ({rank} and {other}|{other} and {rank}) is down"
UNREACHABLE = r"rank ({rank}|{other})(, which would know why,)? does not answer since "
SAVE = r"could not be saved \(rank {rank}: "
FAULTS = {
    "exception": Fault(DEATH, rf"rank {{rank}} on {HOST} failed \(\w*Error: |ArithmeticError: chaos", ANYWHERE),
    "exit": Fault(DEATH, DIED, AT_ANY_MOMENT),
    "segfault": Fault(DEATH, DIED, AT_ANY_MOMENT),
    "SIGKILL": Fault(DEATH, DIED, AT_ANY_MOMENT),
    "SIGTERM": Fault(DEATH, DIED, AT_ANY_MOMENT),
    "all killed": Fault(DEATH, "", AT_ANY_MOMENT),
    "SIGSTOP": Fault(STALL, SILENT, AT_ANY_MOMENT),
    "interpreter held": Fault(STALL, SILENT, AT_ANY_MOMENT),
    "sleep": Fault(STALL, STANDS, IN_BATCH),
    "dead link": Fault(STALL, f"{DOWN}|{UNREACHABLE}", ("forward", "data", "between steps")),
    "pause": Fault(None, "", ANYWHERE),
    "slow rank": Fault(None, "", IN_BATCH),
    "full disk": Fault(SUCCESS, SAVE, ("save",)),
    "failing save": Fault(SUCCESS, "checkpoints is a file; name a folder for checkpoints", ("save",)),
    "corrupt checkpoint": Fault(None, "", ("between steps",)),
}
DOORS = {
    "pipeline": ANYWHERE,
    "plain": ANYWHERE,
    "transformers": ANYWHERE,
    # A loop of one's own saves as it likes.
    "megatron": IN_BATCH,
}
"""The ways to train, and where their jobs can meet a fault beside any moment."""
