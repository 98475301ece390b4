"""The names of an engine's counters in state.json.

The names belong to the file format: a release that renames an engine field changes the right column here, and no file.
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

COUNTERS = {
    "global_steps": "global_steps",
    "global_samples": "global_samples",
    "skipped_steps": "skipped_steps",
    "micro_steps": "micro_steps",
}
"""By name below ``counters``, the field of the engine."""
PULLED = "_pulled_of_training_data"
"""The name below ``counters`` of the micro-batches taken of the engine's own data. Files of earlier releases have it
too."""
TOP_LEVEL = {"micro_offset": "placed.micro_offset"}
"""By name in state.json itself, the field of the engine."""


def read_fields(engine: Any, table: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields of ``engine`` under the names that ``table`` gives them in the file."""
    return {name: attrgetter(field)(engine) for name, field in table.items()}


def write_fields(engine: Any, table: Mapping[str, str], saved: Mapping[str, Any]) -> None:
    """Sets the fields of ``engine`` to what ``saved`` has under their names in the file."""
    for name, field in table.items():
        owner, _, attribute = field.rpartition(".")
        setattr(attrgetter(owner)(engine) if owner else engine, attribute, saved[name])
