"""docs/troubleshooting.md has every message of an error."""

import ast

import pytest

from docs.messages import PACKAGE, VALUE, Module, messages, modules, raised

PASSED_ON = {
    ("checkpoint/files.py", "(DamageError if is_damage else CheckpointError)(sentence)"),
    ("checkpoint/whole.py", "CheckpointError(sentence_of(error, 0))"),
    ("config.py", "ValueError(str(error).partition('; ')[2])"),
    ("integrations/deepspeed/config/client_optimizer.py", "complaint"),
    ("integrations/deepspeed/engine/parameters.py", "complaint"),
    ("integrations/deepspeed/explain/explain.py", "ConfigError(complaint)"),
    ("integrations/deepspeed/model/shared_tensors.py", "complaint"),
    ("integrations/deepspeed/plain/model_state.py", "complaint"),
    ("integrations/megatron/loop/budget.py", "ConfigError(complaint)"),
    ("integrations/split/without_blocks.py", "ConfigError(str(used))"),
    ("partition/disk.py", "OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))"),
    ("partition/disk.py", "OSError(errno.EIO, os.strerror(errno.EIO))"),
    ("partition/guard.py", "str(error)"),
    ("partition/guard.py", "NotGatheredError((cls if absent is None else absent).complaint)"),
    ("watch/launcher.py", "ValueError(answer[1:])"),
}
"""Places that raise what another place said."""
OTHERS = (ast.Name, ast.Attribute)
"""Expressions of statements that raise an error again, or a class without words."""


def test_every_raise_has_its_messages():
    assert {(place.file, place.code) for place in raised() if not place.texts} == PASSED_ON


def test_every_statement_that_raises_is_looked_at():
    """Other statements raise again, end a loop or the process, or raise what never leaves its module."""
    looked_at = {(place.file, place.line) for place in raised()}
    left = [
        ast.unparse(node.exc.func)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and (path.relative_to(PACKAGE).as_posix(), node.lineno) not in looked_at
    ]
    assert set(left) <= {"SystemExit", "StopIteration", "_Reached"}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An empty folder in place of the package, whose modules are then read anew."""
    monkeypatch.setattr("docs.messages.PACKAGE", tmp_path)
    modules.cache_clear()
    yield tmp_path
    modules.cache_clear()


def test_messages_of_every_form_are_found(package):
    (package / "module.py").write_text(
        """
KEY = "key"
LATER = "{} is late; hurry"

class OwnError(ValueError):
    def __init__(self, number):
        super().__init__(f"{number} is wrong")

def complaint(value):
    if value:
        return None
    return f"{KEY} is {value}; change " + ("it" if value else "that")

def function(value):
    said = "first" if value else "second"
    raise ValueError(f"{said}: {value!r}")
    raise ValueError(complaint(value))
    raise ValueError(LATER.format(value))
    raise OwnError(value)
    raise_everywhere(complaint(value), ValueError)
    raise
"""
    )
    found = [place.texts for place in Module(package / "module.py").raised()]
    advice = (f"key is {VALUE}; change it", f"key is {VALUE}; change that")
    assert found == [
        (f"first: {VALUE}", f"second: {VALUE}"),
        advice,
        (f"{VALUE} is late; hurry",),
        (f"{VALUE} is wrong",),
        advice,
    ]


def test_a_name_has_the_same_text_wherever_a_message_has_it(package):
    (package / "module.py").write_text(
        """
def function(value):
    key = "one" if value else "other"
    raise ValueError(f"{key} is {value}; remove {key}")
"""
    )
    (place,) = Module(package / "module.py").raised()
    assert place.texts == (f"one is {VALUE}; remove one", f"other is {VALUE}; remove other")


def test_a_constant_is_that_of_the_module_or_of_the_one_it_is_imported_from(package):
    (package / "first.py").write_text('KEY, OTHER = "first.key", "first.other"')
    (package / "second.py").write_text('KEY = "second.key"')
    (package / "third.py").write_text(
        """
from ds_lgamp.second import KEY
HERE, OTHER = "here", 3

def function():
    raise ValueError(f"{KEY} is {HERE}, not {OTHER}")
"""
    )
    (place,) = Module(package / "third.py").raised()
    assert place.texts == (f"second.key is here, not {VALUE}",)


def test_a_message_stands_beside_its_advice():
    assert "| … chunks cannot occupy … pipeline ranks | use at most … pipeline ranks or more chunks |" in messages(
        "programs"
    )
    assert "| the engine has no optimizer yet | pass one to deepspeed.initialize, " in messages("engine")
