"""What a command that takes long shows."""

import io
import time

import pytest
from rich.console import Console

from ds_lgamp.cli.terminal import at_work


def shown(terminal, seconds, patience=0.01):
    """Returns what a block shows that waits for text to be there, or for ``seconds``."""
    output = io.StringIO()
    with at_work("searching", Console(file=output, force_terminal=terminal), patience):
        end = time.monotonic() + seconds
        while not output.getvalue() and time.monotonic() < end:
            time.sleep(0.005)
    return output.getvalue()


def test_a_terminal_is_told_what_takes_long():
    assert "searching" in shown(terminal=True, seconds=60)


@pytest.mark.parametrize("terminal, seconds, patience", [(True, 0, 60), (False, 0.1, 0.01)])
def test_what_ends_soon_or_nobody_watches_shows_nothing(terminal, seconds, patience):
    assert "searching" not in shown(terminal, seconds, patience)


def test_an_error_inside_the_block_is_raised():
    with pytest.raises(ValueError), at_work("searching", Console(file=io.StringIO(), force_terminal=True)):
        raise ValueError
