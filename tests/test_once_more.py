"""A test that fails is run once more by itself, and only then makes the run red."""

import os
import re
import subprocess
import sys

import pytest

from testing import ROOT
from tests.slow import slow_except

CONFTEST = """
from tests.once_more import add_option, begin

def pytest_addoption(parser):
    add_option(parser)

def pytest_configure(config):
    begin(config)
"""
TESTS = """
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def runs_of(name):
    # One line for each run, with the process that ran it.
    with open(HERE / name, "a+") as file:
        file.write(f"{os.getpid()}\\n")
        file.seek(0)
        return len(file.readlines())


@pytest.mark.parametrize("word", ["a b"])
def test_fails_once(word):
    assert runs_of(f"once {word}") > 1, "the first time"

def test_fails_always():
    assert runs_of("always") > 9, "every time"

@pytest.fixture
def fails_once():
    assert runs_of("fixture") > 1, "in a fixture"

def test_with_a_fixture(fails_once):
    pass

def test_passes():
    runs_of("passes")
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def run(folder, *words):
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    # Plugins that these tests do not need take seconds to start.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


PARALLEL = ("-p", "xdist.plugin", "--numprocesses", "2", "--dist", "loadfile")


@pytest.mark.parametrize("words", slow_except([PARALLEL], [PARALLEL, ()]), ids=["in parallel", "alone"])
def test_what_fails_runs_once_more_by_itself_and_the_summary_says_both(folder, words):
    ended = run(folder, "--once-more", *words)
    assert ended.returncode == 1, ended.stdout
    notes = [path for path in folder.iterdir() if path.is_file() and path.suffix not in (".py", ".ini")]
    runs = {path.name: path.read_text().split() for path in notes}
    runs.pop("__pycache__", None)
    assert {name: len(processes) for name, processes in runs.items()} == {
        **{"once a b": 2, "always": 2, "fixture": 2, "passes": 1}
    }
    assert len({processes[1] for name, processes in runs.items() if name != "passes"}) == 3, "each has its own process"
    for name in ("fails_once[a b]", "with_a_fixture"):
        assert f"test_some.py::test_{name} failed, then passed" in ended.stdout
        assert f"PASSED when run once more: test_some.py::test_{name}" in ended.stdout
    assert "FAILED when run once more: test_some.py::test_fails_always" in ended.stdout
    assert all(f"AssertionError: {reason}" in ended.stdout for reason in ("the first time", "in a fixture"))
    assert re.search(r"=+ 1 failed, 3 passed, 3 rerun in [\d.]+s =+$", ended.stdout.rstrip()), ended.stdout


def test_a_run_in_which_all_pass_at_last_is_green_and_without_the_option_red(folder):
    choice = ["-k", "once or passes", "-m", "not never"]
    assert run(folder, *choice).returncode == 1
    for path in folder.glob("once *"):
        path.unlink()
    ended = run(folder, "--once-more", *choice)
    assert ended.returncode == 0, ended.stdout
    assert re.search(r"=+ 2 passed, 2 deselected, 1 rerun in [\d.]+s =+$", ended.stdout.rstrip()), ended.stdout


def test_many_failures_and_files_that_cannot_be_collected_stay_red_at_once(folder):
    (folder / "test_many.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(21))\ndef test_one(n):\n    assert False\n"
    )
    ended = run(folder, "--once-more", "test_many.py")
    assert ended.returncode == 1 and "once more" not in ended.stdout and " 21 failed in " in ended.stdout
    (folder / "test_many.py").write_text("import nowhere\n")
    ended = run(folder, "--once-more", "test_many.py")
    assert ended.returncode not in (0, 5) and "1 error in" in ended.stdout


def test_hypothesis_draws_with_the_same_profile_once_more(folder, monkeypatch):
    monkeypatch.setenv("PYTEST_PLUGINS", "_hypothesis_pytestplugin")
    (folder / "test_profile.py").write_text(
        "from hypothesis import settings\nfrom test_some import runs_of\n"
        "def test_one():\n    assert runs_of('profile') > 1 and settings.get_current_profile_name() == 'ci'\n"
    )
    ended = run(folder, "--once-more", "--hypothesis-profile", "ci", "test_profile.py")
    assert ended.returncode == 0, ended.stdout
