"""The commands in the blocks of the pages: their programs take all of them, and their files exist.

Those that need neither files nor ranks of a user are run here. Other tests run whole pages: first_run.md, migrate.md,
transformers.md and megatron.md in this folder, the quickstart in tests/launch.
"""

import re
import shlex
from importlib.util import find_spec

import pytest

from benchmarks import __main__ as benchmarks
from ds_lgamp.cli.main import command_line, main
from testing import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("ds_lgamp", "python", "torchrun", "deepspeed", "bash", "pytest")
OWN_FILES = ("launch/", "tests/", "example_configs/", "benchmarks/data/")
VALUES = {"NAME": "memory", "P": "2", "W": "2"}
"""For words that stand for a value, where only certain values are taken."""
SLOW = ("plan --model", "--calibrate")


def commands_of(page):
    """Yields the commands in the blocks of a page, without comments. Continued lines are joined."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    fenced = "\n".join(re.findall(r"^```(?:bash)?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    indented = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    for line in [*fenced.splitlines(), *indented]:
        without_variables = re.sub(r"^(?:[A-Z_]+=\S* )+", "", line.strip())
        command = re.split(r"\s{2,}", without_variables)[0]
        if command.split(" ")[0] in PROGRAMS:
            yield command


def words_behind(name, command):
    words = shlex.split(command)
    return [VALUES.get(word, word) for word in words[words.index(name) + 1 :]]


COMMANDS = sorted({command for page in PAGES for command in commands_of(page)})
OURS = [command for command in COMMANDS if "ds_lgamp" in shlex.split(command)]
ALONE = [
    pytest.param(command, marks=[pytest.mark.slow] if any(word in command for word in SLOW) else [])
    for command in OURS
    if re.match(r"ds_lgamp (schedule|env|plan)\b", command)
    if "--calibrate" in command or not re.search(r"\w\.json\b", command)
]
"""Commands of ours that need nothing of a user."""


def test_the_pages_show_commands_of_every_program():
    assert {command.split(" ")[0] for command in COMMANDS} == set(PROGRAMS) and len(OURS) > 20 and len(ALONE) > 5


@pytest.mark.parametrize("command", OURS)
def test_ds_lgamp_takes_the_command(command):
    command_line().parse_args(words_behind("ds_lgamp", command))


@pytest.mark.parametrize("command", [command for command in COMMANDS if "-m benchmarks " in command])
def test_the_benchmarks_take_the_command(command):
    benchmarks.command_line().parse_args(words_behind("benchmarks", command))


@pytest.mark.parametrize("command", COMMANDS)
def test_files_and_modules_of_the_command_exist(command):
    words = shlex.split(command)
    # pytest has an -m of its own.
    launched = [] if words[0] == "pytest" else words[: words.index("pytest")] if "pytest" in words else words
    modules = [name for option, name in zip(launched, launched[1:]) if option in ("-m", "--module")]
    assert not [name for name in modules if find_spec(name) is None]
    assert not [word for word in words if word.startswith(OWN_FILES) and not (ROOT / word).exists()]


@pytest.mark.parametrize("command", ALONE)
def test_the_command_ends_well(command, tmp_path, monkeypatch, capfd):
    words = [str(ROOT / word) if word.startswith(OWN_FILES) else word for word in words_behind("ds_lgamp", command)]
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    assert capfd.readouterr().out
