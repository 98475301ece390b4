"""What several commands share: values of options, files that they name, standard output."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def count(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' must be a whole number from 1")
    return int(text)


def why_not_writable(path: Path) -> str | None:
    """Returns why a file cannot be written, to follow the name of its option; None if it can be. Leaves no file."""
    try:
        existed = path.exists()
        with open(path, "a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        return f"'{path}', which cannot be written ({error.strerror}); name another file"
    return None


def write_file(parser: argparse.ArgumentParser, option: str, path: Path, content: bytes) -> None:
    """Writes the file that an option names. Ends the command with a sentence if that fails."""
    try:
        path.write_bytes(content)
    except OSError as error:
        parser.error(f"{option} is '{path}', which cannot be written ({error.strerror}); name another file")


@contextmanager
def own_output() -> Iterator[TextIO]:
    """Keeps standard output for the command. Whatever scripts and libraries print in between goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(kept, "w", closefd=False) as output:
            yield output
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
