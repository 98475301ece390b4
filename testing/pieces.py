"""Watches the pieces of rows in which head and loss are computed."""

from collections.abc import Callable
from typing import Any

from ds_lgamp.runtime import pieces


def watch_pieces(replace: Callable[[Any, str, Any], None] = setattr) -> list[int]:
    """Returns a list to which every loss of a piece adds its rows from now on.

    Args:
        replace: sets an attribute.
    """
    seen: list[int] = []
    stock = pieces.Losses.of

    def of(self: Any, hidden: Any, targets: Any) -> Any:
        seen.append(len(hidden))
        return stock(self, hidden, targets)

    replace(pieces.Losses, "of", of)
    return seen
