"""Records the steps for which the block asks: ``ds_lgamp.trace``."""

import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.partition.agreement import everyone, raise_everywhere
from ds_lgamp.runtime.trace import Trace
from ds_lgamp.view.recording import RankRecording
from ds_lgamp.watch.this_rank import this_rank


def trace_if_asked(settings: LgampConfig, pipeline_rank: int, data_rank: int, device: torch.device) -> Trace | None:
    """Returns the trace for which a block asks; None if it asks for none. Collective over all ranks if it does.

    Raises ConfigError on every rank if one of them cannot write, or if another engine does.
    """
    if settings.trace is None:
        return None
    first, last = settings.traced_steps
    words = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    own = RankRecording(dist.get_rank(), pipeline_rank, data_rank, socket.gethostname(), words)
    folder, trace, trouble = Path(settings.trace).resolve(), None, None
    if folder in this_rank.traces:
        trouble = "where another engine of the script records"
    else:
        try:
            trace = this_rank.traces[folder] = Trace(folder, first, last, own, dist.get_world_size(), device)
        except OSError as error:
            trouble = f"which cannot be written ({error.strerror})"
    complaint = None if trouble is None else f"{BLOCK}.trace is '{settings.trace}', {trouble}; use another folder"
    raise_everywhere(complaint, ConfigError)
    own.begun = everyone(time.time())[0]
    if own.rank == 0:
        print(f"ds_lgamp: steps {first} to {last} are recorded in {settings.trace}", file=sys.stderr)
    return trace
