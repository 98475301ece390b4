"""Checks which modules import which. Reads every import statement of the sources, also those inside functions."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from typing import NamedTuple

import pytest

from testing import ROOT

FLOORS = (
    ("autoload", "fields", "version"),
    ("schedule",),
    ("config", "cost", "view"),
    ("planner",),
    ("watch",),
    ("partition", "runtime"),
    ("checkpoint", "optimizers"),
    (
        "integrations.cluster_file",
        "integrations.hosts",
        "integrations.program_spec",
        "integrations.user_script",
    ),
    (
        "integrations.megatron.layers",
        "integrations.megatron.loop",
        "integrations.split",
        "integrations.transformers",
        "integrations.deepspeed.model",
    ),
    ("integrations.deepspeed.config",),
    ("integrations.deepspeed.checkpoint",),
    ("integrations.deepspeed.engine",),
    ("integrations.deepspeed.plain",),
    ("integrations.deepspeed.explain",),
    ("integrations.deepspeed.hook",),
    ("cli",),
    ("__init__", "__main__"),
)
"""The rooms of ds_lgamp, lowest floor first. A room imports from lower floors. It imports from a room on its own floor
if that room does not import it."""
STRANGERS = (
    *(("config", room) for room in ("cost", "view", "watch", "partition", "runtime", "checkpoint", "optimizers")),
    *(
        ("planner", room)
        for room in ("view", "watch", "partition", "runtime", "checkpoint", "optimizers", "integrations")
    ),
    ("checkpoint", "optimizers"),
    ("integrations.megatron", "integrations.deepspeed"),
    ("integrations.megatron", "integrations.transformers"),
    ("integrations.megatron.layers", "integrations.megatron.loop"),
)
"""Pairs of rooms. Neither imports the other."""
FOLDERS = ("ds_lgamp", "testing", "benchmarks")
"""Nobody imports tests. What they import is not looked at."""


class Import(NamedTuple):
    """One imported name."""

    module: str
    """The module that imports."""
    source: str
    """The module that is imported from."""
    name: str
    """The imported name; "" if a module is imported as a whole."""


@cache
def modules() -> dict[str, ast.Module]:
    """Returns every module of the repository by its dotted path."""
    found = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


@cache
def imports() -> list[Import]:
    return [found for module, tree in modules().items() for node in ast.walk(tree) for found in imported(module, node)]


def imported(module: str, node: ast.AST) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(module, alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0 and node.module, f"{module} imports relative to itself"
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            yield Import(module, whole, "") if whole in modules() else Import(module, node.module, alias.name)


def room_of(module: str) -> str:
    """Returns the room of a module of ds_lgamp. A room may contain rooms."""
    inside = module.removeprefix("ds_lgamp").removeprefix(".") or "__init__"
    rooms = [room for floor in FLOORS for room in floor if is_in(inside, room)]
    assert rooms, f"{module} is in no room; add its folder to FLOORS"
    return rooms[0]


def is_in(module: str, room: str) -> bool:
    return f"{module}.".startswith(f"{room}.")


def inside_ds_lgamp() -> list[Import]:
    """Returns the imports of modules of ds_lgamp by others. Skips folders that only hold rooms: they import nothing and
    nothing imports them."""
    return [one for one in imports() if is_in(one.module, "ds_lgamp") and is_in(one.source, "ds_lgamp")]


def between_rooms() -> set[tuple[str, str]]:
    pairs = {(room_of(one.module), room_of(one.source)) for one in inside_ds_lgamp()}
    return {(importer, source) for importer, source in pairs if importer != source}


def imports_outside(room: str) -> set[str]:
    """Returns the packages outside Python's own that modules of a room import."""
    own = {one.source.partition(".")[0] for one in imports() if is_in(one.module, f"ds_lgamp.{room}")}
    return own - set(sys.stdlib_module_names) - {"ds_lgamp"}


def test_no_room_imports_a_higher_one():
    height = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    wrong = [one for one in inside_ds_lgamp() if height[room_of(one.module)] < height[room_of(one.source)]]
    assert not wrong


@pytest.mark.parametrize("pair", STRANGERS, ids=" and ".join)
def test_strangers_do_not_import_each_other(pair):
    wrong = [
        one
        for one in inside_ds_lgamp()
        for first, second in (pair, pair[::-1])
        if is_in(one.module, f"ds_lgamp.{first}") and is_in(one.source, f"ds_lgamp.{second}")
    ]
    assert not wrong


def test_rooms_import_each_other_in_no_circle():
    graph: dict[str, set[str]] = {}
    for importer, source in between_rooms():
        graph.setdefault(importer, set()).add(source)
    TopologicalSorter(graph).prepare()


def test_modules_import_each_other_in_no_circle():
    graph: dict[str, set[str]] = {}
    for one in inside_ds_lgamp():
        graph.setdefault(one.module, set()).add(one.source)
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("room", ["schedule", "cost", "view", "planner"])
def test_what_needs_no_tensors_is_pure_python(room):
    assert imports_outside(room) == set()


def test_the_configuration_imports_the_schedule_fields_and_its_parser_only():
    assert imports_outside("config") == {"pydantic"}
    assert {source for importer, source in between_rooms() if importer == "config"} == {"fields", "schedule"}


@pytest.mark.parametrize("room", ["watch", "partition", "runtime", "checkpoint", "optimizers"])
def test_what_every_host_shares_knows_no_host(room):
    assert not imports_outside(room) & {"deepspeed", "megatron", "transformers"}


def test_nobody_takes_a_constant_from_a_formula():
    taken = [one for one in inside_ds_lgamp() if is_in(one.source, "ds_lgamp.cost") and one.name.isupper()]
    assert not [one for one in taken if room_of(one.module) != "cost"]


def test_tests_import_nothing_relative_to_themselves():
    assert not [path for path in (ROOT / "tests").rglob("*.py") if re.search(r"^\s*from \.", path.read_text(), re.M)]


@pytest.mark.parametrize(
    ("folder", "others"),
    [
        ("ds_lgamp", {"testing", "benchmarks", "tests", "docs"}),
        ("testing", {"benchmarks", "tests"}),
        ("benchmarks", {"tests"}),
    ],
)
def test_a_folder_does_not_import_those_that_use_it(folder, others):
    assert not [one for one in imports() if is_in(one.module, folder) and one.source.partition(".")[0] in others]
