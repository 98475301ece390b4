"""Reads the fields of files.

Every function that reads raises ValueError that names the field, its value and the fix.
"""

import json
from collections.abc import Collection, Mapping
from math import inf
from pathlib import Path
from typing import Any


def read_text(source: str | Path, option: str) -> str:
    """Returns the text of the file ``source``, without the byte order mark that some programs put in front.

    Args:
        option: what names the file, for the sentence if it cannot be read.
    """
    try:
        return Path(source).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(
            f"{option} is '{source}', which cannot be read ({error.strerror}); name another file"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{option} is '{source}', which is no text in UTF-8 ({error.reason}); save it as such"
        ) from None


def read_json(source: str | Path, option: str = "cluster") -> dict[str, Any]:
    """Returns the object in the JSON file ``source``, which ``option`` names."""
    text = read_text(source, option)
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option} is '{source}', which is no JSON: {error}") from error
    except RecursionError:
        raise ValueError(f"{option} is '{source}', which is nested too deeply to read; name another file") from None
    if not isinstance(found, dict):
        raise ValueError(f"{option} is '{source}', which holds no JSON object; name another file")
    return found


def refuse_unknown(prefix: str, text: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuses keys of ``text`` that are not ``known``. ``prefix`` says where it stands, such as ``between.``."""
    for key in text:
        if key not in known:
            raise ValueError(f"{prefix}{key} is unknown; use {', '.join(sorted(known))}")


def section(text: Mapping[str, Any], name: str, known: Collection[str]) -> Mapping[str, Any]:
    """Returns the object at the field ``name``, with ``known`` keys only."""
    found = text.get(name)
    if not isinstance(found, Mapping):
        raise ValueError(f"{name} is {found!r}; write an object with {', '.join(sorted(known))}")
    refuse_unknown(f"{name}.", found, known)
    return found


def count(field: str, value: object) -> int:
    """Returns a whole number from 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{field} is {value!r}; use a whole number from 1")
    return value


def positive(field: str, value: object) -> float:
    """Returns a finite number above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
        raise ValueError(f"{field} is {value!r}; use a number above 0")
    return float(value)


def word(field: str, value: object) -> str:
    """Returns a text without blanks at its ends."""
    if not isinstance(value, str) or not value or value.strip() != value:
        raise ValueError(f"{field} is {value!r}; write a name")
    return value
