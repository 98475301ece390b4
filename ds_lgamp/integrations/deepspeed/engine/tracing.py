"""Records the steps for which the block asks: ``ds_lgamp.trace``."""

import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.partition.agreement import raise_everywhere
from ds_lgamp.runtime.trace import Trace
from ds_lgamp.view.recording import RankRecording


def trace_if_asked(engine: Any) -> Trace | None:
    """Returns the trace of an engine; None if its block has none. Collective over all ranks if it has.

    Raises ConfigError on every rank if one of them cannot write.
    """
    settings = engine.lgamp_settings
    if settings.trace is None:
        return None
    first, last = settings.traced_steps
    device = engine.device
    words = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    own = RankRecording(dist.get_rank(), engine.stage_id, engine.grid.data_parallel_id, socket.gethostname(), words)
    trace, complaint = None, None
    try:
        trace = Trace(Path(settings.trace), first, last, own, dist.get_world_size(), device)
    except OSError as error:
        complaint = (
            f"{BLOCK}.trace is '{settings.trace}', which cannot be written ({error.strerror}); use another folder"
        )
    raise_everywhere(complaint, ConfigError)
    return trace
