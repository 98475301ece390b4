"""Values that options of several commands take, and files that they name."""

import argparse
from pathlib import Path


def count(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' must be a whole number from 1")
    return int(text)


def write_file(parser: argparse.ArgumentParser, option: str, path: Path, content: bytes) -> None:
    """Writes the file that an option names. Ends the command with a sentence if that fails."""
    try:
        path.write_bytes(content)
    except OSError as error:
        parser.error(f"{option} is '{path}', which cannot be written ({error.strerror}); name another file")
