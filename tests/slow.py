"""Divides tests into those of the default set and slow ones, which ``launch/test.sh --all`` runs too."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def slow_except(default: Collection[Any], values: Sequence[Any], several: bool = False) -> list[Any]:
    """Returns ``values`` for a parameter. Those that are not in ``default`` are slow. With ``several`` each value is a
    tuple for several parameters."""
    slow = pytest.mark.slow
    return [
        value if value in default else pytest.param(*(value if several else (value,)), marks=slow) for value in values
    ]


def chosen(request: pytest.FixtureRequest, *parameters: str) -> set[Any]:
    """Returns the values of ``parameters`` in the tests of this module that run, for fixtures that compute no more than
    those need."""
    calls = [item.callspec for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return {call.params[name] for call in calls for name in parameters if name in call.params}
