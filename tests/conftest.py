"""Tests run on the CPU and gloo, whatever the machine has."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
