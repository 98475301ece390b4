"""Tests run on the CPU and gloo, whatever the machine has."""

import os

from hypothesis import settings

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# An example takes as long as the machine is busy.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
