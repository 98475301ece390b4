"""Calls ``ds_lgamp.install()`` itself and then runs the public example."""

import runpy
from pathlib import Path

import ds_lgamp

ds_lgamp.install()
runpy.run_path(str(Path(__file__).with_name("public_example.py")), run_name="__main__")
