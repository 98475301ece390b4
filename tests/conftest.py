"""Tests run on the CPU and gloo on every machine."""

import gc
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from tests.once_more import add_option, begin
from tests.patched import other_versions, use_patched
from tests.slow import in_part, read_part

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Several processes of tests and their ranks share the cores. Threads that wait for each other at the end of every
# small operation take ten times as long then.
os.environ["OMP_NUM_THREADS"] = "1"

# No example has a deadline, because it takes longer on a busy machine. The same code is tried on the same examples, so
# that a change which passes here passes elsewhere; launch/test.sh --all looks for new ones.
settings.register_profile("same_examples", deadline=None, derandomize=True)
settings.register_profile("new_examples", deadline=None)
settings.load_profile("same_examples")


def pytest_addoption(parser):
    parser.addoption(
        "--patched", action="store_true", help="run with copies of DeepSpeed and Megatron-core that patches/ changes"
    )
    add_option(parser)
    parser.addoption("--part", metavar="K/N", help="only the files in part K of N, which begin with 0")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--part"):
        part = read_part(config.getoption("--part"))
        by_part = {True: [], False: []}
        for item in items:
            by_part[in_part(item.path.relative_to(config.rootpath), part)].append(item)
        items[:] = by_part[True]
        config.hook.pytest_deselected(items=by_part[False])


def pytest_configure(config):
    begin(config)
    if config.getoption("--patched"):
        if other_versions():
            raise pytest.UsageError(other_versions())
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        use_patched(Path(folder.name))


def pytest_collection_finish():
    # Whoever looks for garbage then leaves out what was imported and collected.
    gc.freeze()


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a disk of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount")
    yield folder
    subprocess.run(["umount", folder], check=True)
