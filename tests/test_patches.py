"""``patches/`` fits the installed hosts, and the tests pass with patched hosts without a replacement at run time."""

import os
import re
import subprocess
import sys

import pytest

from testing import ROOT
from tests.patched import PATCHES, copy_patched, misfit, other_versions, patch_folders

SUITE = (
    "tests/patched_hosts.py",
    "tests/integrations/deepspeed/hook/test_install.py::test_without_an_enabled_block_deepspeed_is_stock_to_the_bit",
    "tests/integrations/deepspeed/hook/test_install.py::test_uninstall_leaves_no_trace",
)
"""The part that CI runs. ``pytest --patched`` runs all."""


ADDED = {
    "deepspeed": ("deepspeed/runtime/engine_registry.py", "def register_engine_factory"),
    "megatron-core": ("megatron/core/pipeline_parallel/schedules.py", "def register_forward_backward_func"),
}
"""A file of each patched host, and what the patches add to it."""


@pytest.mark.parametrize(
    "patch", sorted(PATCHES.glob("*/*.patch")), ids=lambda patch: f"{patch.parent.name}/{patch.stem[:4]}"
)
def test_a_patch_says_what_and_why(patch):
    header, _, _ = patch.read_text().partition("\n---\n")
    author, subject, empty, *why = header.splitlines()
    assert author == "From: The ds_lgamp contributors <>"
    assert re.fullmatch(r"Subject: \[PATCH\] [A-Z].{20,60}[^.]", subject) and not empty
    assert len(why) > 4 and max(map(len, why)) < 80
    assert f"({patch.parent.name}/{patch.name})" in (PATCHES / "README.md").read_text()


@pytest.mark.parametrize("folder", patch_folders(), ids=lambda folder: folder.name)
def test_every_patch_applies_without_fuzz_or_offset(folder, tmp_path):
    if misfit(folder):
        pytest.skip(misfit(folder))
    copy_patched(folder, tmp_path)
    name, _ = folder.name.rsplit("-", 1)
    file, added = ADDED[name]
    assert added in (tmp_path / file).read_text()


@pytest.mark.slow
def test_the_suite_passes_with_patched_hosts_and_nothing_is_replaced():
    if other_versions():
        pytest.skip(other_versions())
    command = [sys.executable, "-m", "pytest", "--patched", "-p", "no:cacheprovider", *SUITE]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"=+ \d+ passed(, \d+ warnings?)? in ", done.stdout), done.stdout
