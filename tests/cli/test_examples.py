"""Every command shows examples, and they are what its parser takes."""

import shlex

import pytest

from ds_lgamp.cli.main import command_line, main
from ds_lgamp.cli.terminal import EXAMPLES


def words(example):
    """Returns what ``ds_lgamp`` gets of an example."""
    program, *rest = shlex.split(example)
    return rest if program == "ds_lgamp" else rest[rest.index("ds_lgamp") + 1 :]


@pytest.mark.parametrize("command", EXAMPLES)
def test_the_help_of_a_command_shows_its_examples(command, capsys):
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    shown = capsys.readouterr().out
    assert all(f"\n  {example}\n" in shown for example in EXAMPLES[command])


@pytest.mark.parametrize("example", [example for examples in EXAMPLES.values() for example in examples])
def test_an_example_is_a_line_that_the_command_takes(example):
    command_line().parse_args(words(example))
