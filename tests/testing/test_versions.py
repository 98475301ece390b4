"""The runs of the tests with other versions: interpreters, outcomes and the record."""

import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from testing.versions import __main__ as versions
from testing.versions.__main__ import outcomes, parse
from testing.versions.environments import Versions, interpreter, pins_beside, requirements_of_tests
from testing.versions.record import TORCHES, TestRun, add, page_block, read

RUN = TestRun(
    "3.12.1", "2.9.1+cpu", "0.19.8", "0.16.1", "5.23.0", "default set", 7, 1, [], [], 3.0, "2030-01-01", "abc"
)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Returns a function that puts a command on a search path that has nothing else but the shell's."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    def write(name, line):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)

    return write


def test_an_interpreter_on_the_search_path_tells_its_own_path(command):
    command("python9.9", f"exec {sys.executable} -c 'print(\"/some/python9.9\")'")
    assert interpreter("9.9", "uv") == "/some/python9.9"


def test_an_interpreter_that_pyenv_only_announces_is_taken_from_its_folder(command, tmp_path):
    command("python9.9", "exit 127")
    command("pyenv", f'[ "$*" = "prefix 9.9" ] && echo {tmp_path}')
    assert interpreter("9.9", "uv") == str(tmp_path / "bin" / "python")


def test_without_both_uv_is_asked_and_may_download_nothing(command):
    command("pyenv", "exit 1")
    command("uv", '[ "$*" = "python find --no-python-downloads 9.9" ] && echo /of/uv')
    assert interpreter("9.9", "uv") == "/of/uv"


def test_a_missing_interpreter_is_named(command):
    with pytest.raises(SystemExit, match="Python 9.9 cannot be found; install it, or leave it out with --pythons"):
        interpreter("9.9", "uv")


def test_environments_get_everything_but_the_versions_that_vary():
    pytest.importorskip("tomllib")
    versions = Versions("3.12", "2.15", "0.19.8")
    names = requirements_of_tests(versions)
    assert {"pytest", "pytest-xdist", "xxhash>=3", "megatron-core>=0.16.1,<0.17", "deepspeed==0.19.8"} <= set(names)
    assert not any(name.startswith("torch") for name in names)
    pinned = {pin.partition("==")[0] for pin in pins_beside(versions)}
    assert {"pytest", "megatron-core"} <= pinned and {"torch", "deepspeed"}.isdisjoint(pinned)


def test_a_package_in_another_version_is_neither_pinned_nor_bounded():
    pytest.importorskip("tomllib")
    tried = "megatron-core==0.19.2"
    versions = Versions("3.12", "2.15", "0.19.8", (tried,))
    assert [name for name in requirements_of_tests(versions) if name.startswith("megatron-core")] == [tried]
    assert not any(pin.startswith("megatron-core") for pin in pins_beside(versions))
    assert versions.name == "python3.12-torch2.15-deepspeed0.19.8-megatron-core0.19.2"


def test_words_after_the_dashes_go_to_pytest():
    options, tests = parse(["--pythons", "3.12", "--", "tests/cost", "-m", "slow"])
    assert tuple(options.pythons) == ("3.12",) and tuple(options.torch) == TORCHES
    assert tests == ["tests/cost", "-m", "slow"] and parse([])[1] == []


REPORT = """<testsuites><testsuite>
<testcase classname="a" name="passes"/>
<testcase classname="a" name="fails"><failure/></testcase>
<testcase classname="a" name="breaks"><error/></testcase>
<testcase classname="a" name="waits"><skipped/></testcase>
<testcase classname="a" name="breaks later"><skipped/><error/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_counted():
    report = ElementTree.ElementTree(ElementTree.fromstring(REPORT))
    assert outcomes(report) == (1, 1, ["a.fails", "a.breaks", "a.breaks later"])


def test_a_later_run_with_the_same_versions_takes_the_place_of_the_earlier(tmp_path):
    path = tmp_path / "record.json"
    newer, other = replace(RUN, failed=["a.fails"]), replace(RUN, torch="2.10.0")
    subset, later = replace(RUN, tests="tests/cost"), replace(RUN, megatron_core="0.19.2")
    for run in (later, RUN, other, subset, newer):
        add(run, path)
    assert read(path) == [newer, subset, later, other]


def test_the_page_shows_failures_and_what_was_not_run(tmp_path):
    path = tmp_path / "record.json"
    add(replace(RUN, failed=["a.fails"], passed_alone=["a.slow"]), path)
    *rows, _, rest = page_block(path).splitlines()
    assert "7 passed; 1 of them when run once more; **1 failed**: a.fails" in rows[-1]
    assert "torch 2.9 with 3.10, 3.11, 3.13; torch 2.10 with 3.10, 3.11, 3.12, 3.13" in rest


def test_a_part_of_the_tests_is_no_run_of_the_default_set(tmp_path):
    add(replace(RUN, tests="tests/cost"), tmp_path / "record.json")
    assert "torch 2.9 with 3.10, 3.11, 3.12, 3.13" in page_block(tmp_path / "record.json")


def test_what_has_run_is_recorded_once_nothing_tests_the_tree_any_more(tmp_path, monkeypatch):
    record, ran = tmp_path / "record.json", []

    def run(*_):
        assert not record.exists()
        ran.append(replace(RUN, torch=f"2.{len(ran)}"))
        if len(ran) == 3:
            raise KeyboardInterrupt
        return ran[-1]

    monkeypatch.setattr(versions, "environment", lambda *_: tmp_path / "bin" / "python")
    monkeypatch.setattr(versions, "run_tests", run)
    with pytest.raises(KeyboardInterrupt):
        versions.main(["--pythons", "3.12", "--torch", "2.0", "2.1", "2.2", "--json", str(record)])
    assert read(record) == ran[:2]
