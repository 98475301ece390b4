"""A rank that trains until it is killed: ``python -m benchmarks.gpu_day.endless FOLDER PIPELINE_RANKS``.

Its environment is that of a launcher. It writes a file into the folder when it trains steadily.
"""

import os
import sys
from pathlib import Path

from benchmarks.gpt.contenders import Layered
from benchmarks.gpt.process import start_hosts
from benchmarks.gpu_day.equality import device, losses_of, size
from benchmarks.gpu_day.layouts import share_device

folder, pipeline_ranks = Path(sys.argv[1]), int(sys.argv[2])
share_device(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
start_hosts()
training = Layered(size(), "full", device(), 3, pipeline_ranks)
losses_of(training)
(folder / os.environ["RANK"]).touch()
while True:
    training.step()
