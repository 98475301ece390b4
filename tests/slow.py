"""Divides tests into those of the default set, slow ones, which ``launch/test.sh --all`` runs too, and the rest."""

import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings


def slow_except(
    default: Collection[Any], values: Sequence[Any], several: bool = False, slow: Collection[Any] | None = None
) -> list[Any]:
    """Returns ``values`` for a parameter. Those that are not in ``default`` are slow; if ``slow`` is given, those in
    neither run only with ``-m full``. With ``several`` each value is a tuple for several parameters."""

    def marked(value: Any) -> Any:
        mark = pytest.mark.slow if slow is None or value in slow else pytest.mark.full
        return pytest.param(*(value if several else (value,)), marks=mark)

    return [value if value in default else marked(value) for value in values]


def chosen(request: pytest.FixtureRequest, *parameters: str) -> set[Any]:
    """Returns the values of ``parameters`` in the tests of this module that run, for fixtures that compute no more than
    those need."""
    calls = [item.callspec for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return {call.params[name] for call in calls for name in parameters if name in call.params}


def examples(most: int) -> int:
    """Returns how many examples hypothesis draws of a test whose examples take long: ``most`` where it draws new ones,
    as ``launch/test.sh --all`` lets it, and a third of them in the default set."""
    return most if settings.get_current_profile_name() == "new_examples" else -(-most // 3)


class Part(NamedTuple):
    """One of several parts of the files of tests, by its number from 0."""

    number: int
    parts: int


def read_part(text: str) -> Part:
    """Reads a part such as "3/8". Raises UsageError if there is no such part."""
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and int(number) < int(parts)):
        raise pytest.UsageError(f"--part is {text}; give a number from 0 and how many parts there are, such as 3/8")
    return Part(int(number), int(parts))


FIRST_GPU = Path("tests/benchmarks/test_gpu_day.py")
"""In every part, because what a first GPU runs must always work."""


def in_part(file: Path, part: Part) -> bool:
    """Whether the ``file``, relative to the repository, is in ``part``. It stays there when others come or go."""
    return file == FIRST_GPU or zlib.crc32(file.as_posix().encode()) % part.parts == part.number
