"""``patches/`` fits the installed hosts, each patch has tests that need it, and the suite passes with patched hosts
without a replacement at run time."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from testing import ROOT
from testing.launching import ON_CPU
from tests.patched import (
    CODE_ALONE,
    PATCHES,
    apply_patch,
    copy_host,
    copy_patched,
    misfit,
    other_versions,
    patch_folders,
)

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
HELPERS = {"deepspeed": "tests/unit/common.py", "megatron-core": "tests/unit_tests/test_utilities.py"}
"""What tests of each host import from its own tests, for which testing/stand_ins/host_tests has a file."""

each_patch = pytest.mark.parametrize(
    "patch", sorted(PATCHES.glob("*/*.patch")), ids=lambda patch: f"{patch.parent.name}/{patch.stem[:4]}"
)


def file_of_tests(patch):
    """Returns the name of the file of tests that a patch adds."""
    (name,) = re.findall(r"^ create mode 100644 (tests/\S+)$", patch.read_text(), re.MULTILINE)
    return name


@each_patch
def test_a_patch_says_what_and_why_and_how_it_was_tested(patch):
    header, _, _ = patch.read_text().partition("\n---\n")
    author, subject, empty, *why = header.splitlines()
    assert author == "From: The ds_lgamp contributors <>"
    assert re.fullmatch(r"Subject: \[PATCH\] [A-Z].{20,60}[^.]", subject) and not empty
    assert len(why) > 4 and max(map(len, why)) < 80
    assert re.search(rf"^Tested by\s{re.escape(file_of_tests(patch))}: ", header, re.MULTILINE)
    assert f"({patch.parent.name}/{patch.name})" in (PATCHES / "README.md").read_text()


@pytest.mark.parametrize("folder", patch_folders(), ids=lambda folder: folder.name)
def test_every_patch_applies_without_fuzz_or_offset(folder, tmp_path):
    if misfit(folder):
        pytest.skip(misfit(folder))
    copy_patched(folder, tmp_path)
    name, _ = folder.name.rsplit("-", 1)
    file, added = ADDED[name]
    assert added in (tmp_path / file).read_text()


def run_its_tests(patch, folder):
    """Runs the tests of a patch with the host in ``folder``. Returns the status and what pytest printed."""
    name = file_of_tests(patch)
    apply_patch(patch, folder, f"--include={name}")
    host, _ = patch.parent.name.rsplit("-", 1)
    helper = folder / HELPERS[host]
    helper.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "testing" / "stand_ins" / "host_tests" / helper.name, helper)
    for package in {*helper.relative_to(folder).parents, *(folder / name).relative_to(folder).parents} - {Path()}:
        (folder / package / "__init__.py").touch()
    command = ["-m", "pytest", "-p", "no:cacheprovider", name]
    if host == "megatron-core":
        command = ["-m", "testing.cpu_shim", *command]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    path = os.pathsep.join(map(str, (folder, folder / "tests", ROOT)))
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**kept, **ON_CPU, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@each_patch
def test_the_tests_of_a_patch_pass_with_it_alone_and_fail_without_it(patch, tmp_path):
    if misfit(patch.parent):
        pytest.skip(misfit(patch.parent))
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
        copy_host(patch.parent, tmp_path / name)
    apply_patch(patch, tmp_path / "with", CODE_ALONE)
    status, printed = run_its_tests(patch, tmp_path / "with")
    assert status == 0 and re.search(r"=+ \d+ passed(, \d+ warnings?)? in ", printed), printed
    status, printed = run_its_tests(patch, tmp_path / "without")
    assert status and " passed" not in printed.splitlines()[-1], printed


@pytest.mark.slow
def test_the_suite_passes_with_patched_hosts_and_nothing_is_replaced():
    if other_versions():
        pytest.skip(other_versions())
    command = [sys.executable, "-m", "pytest", "--patched", "-p", "no:cacheprovider", *SUITE]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"=+ \d+ passed(, \d+ warnings?)? in ", done.stdout), done.stdout
