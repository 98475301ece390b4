"""Passes with one mistake in their source, and the programs that they build."""

import ast
import importlib
import inspect
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from ds_lgamp import schedule

PASSES = ("transfers", "program")
"""The modules of ds_lgamp.schedule that place actions. The second imports the first."""
SECONDS = 0.1
"""For so long a wrong pass may compute one program, which takes a right one a few milliseconds. A wrong condition may
loop for ever."""
WRONG = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
}
"""Which operator a mistake writes for which."""
OTHER_KIND = {"FORWARD": "BACKWARD", "BACKWARD": "FORWARD", "WAIT_REDUCE": "REDUCE", "GATHER": "REDUCE"}


class Mistake(NamedTuple):
    """A module of passes with one mistake."""

    module: str
    tree: ast.Module
    place: str
    """Its line, and what stands there now."""

    def __str__(self) -> str:
        return f"{self.module}.py:{self.place}"


def mistakes(module: str, share: int) -> Iterator[Mistake]:
    """Yields a module with one in ``share`` of all mistakes of some kinds in its functions: another comparison, sum,
    conjunction or kind of action; a number that is one larger; a condition that is not asked; a sort or a statement
    that is missing."""
    text = inspect.getsource(importlib.import_module(f"ds_lgamp.schedule.{module}"))
    source = ast.parse(text)
    functions = [node for node in ast.walk(source) if isinstance(node, ast.FunctionDef)]
    nodes = {node for function in functions for part in function.body for node in ast.walk(part)}
    every = [
        (number, change) for number, node in enumerate(ast.walk(source)) if node in nodes for change in _changes(node)
    ]
    for number, change in every[::share]:
        tree = ast.parse(text)
        wrong = next(islice(ast.walk(tree), number, None))
        change(wrong)
        yield Mistake(module, ast.fix_missing_locations(tree), f"{wrong.lineno}: {ast.unparse(wrong)}")


def _changes(node: ast.AST) -> list[Callable[[Any], None]]:
    """Returns what makes ``node`` wrong."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in WRONG:
        return [lambda wrong: wrong.ops.__setitem__(0, WRONG[type(wrong.ops[0])]())]
    if isinstance(node, (ast.BoolOp, ast.BinOp)) and type(node.op) in WRONG:
        return [lambda wrong: setattr(wrong, "op", WRONG[type(wrong.op)]())]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return [lambda wrong: setattr(wrong, "value", wrong.value + 1)]
    if isinstance(node, ast.Attribute) and node.attr in OTHER_KIND:
        return [lambda wrong: setattr(wrong, "attr", OTHER_KIND[wrong.attr])]
    if isinstance(node, (ast.If, ast.IfExp)):
        return [lambda wrong, asked=asked: setattr(wrong, "test", ast.Constant(asked)) for asked in (True, False)]
    if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp)) and node.generators[0].ifs:
        return [lambda wrong: wrong.generators[0].ifs.clear()]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("sorted", "reversed"):
        return [lambda wrong: (setattr(wrong.func, "id", "list"), wrong.keywords.clear())]
    if isinstance(node, (ast.Expr, ast.AugAssign, ast.Assign)) and not isinstance(node.value, ast.Constant):
        return [_leave_out]
    return []


def _leave_out(statement: Any) -> None:
    statement.__class__, statement.__dict__ = ast.Expr, {**vars(statement), "value": ast.Constant(None)}


@contextmanager
def builder(mistake: Mistake) -> Iterator[Callable[..., Any]]:
    """Yields ``build_program`` with passes that have a mistake. It returns None where they fail."""
    names = PASSES[PASSES.index(mistake.module) :]
    stock = {name: importlib.import_module(f"ds_lgamp.schedule.{name}") for name in names}
    try:
        for name, module in stock.items():
            made = ModuleType(module.__name__)
            code = mistake.tree if name == mistake.module else ast.parse(inspect.getsource(module))
            _enter(name, made)
            exec(compile(code, f"{name} with a mistake", "exec"), vars(made))
        build = vars(made)["build_program"]
    finally:
        for name, module in stock.items():
            _enter(name, module)

    def limited(spec: Any) -> Any:
        # The processor's time, because a busy machine must not make a mistake look like a loop.
        before = signal.signal(signal.SIGVTALRM, _give_up)
        # Again and again, because what it interrupts may swallow the error.
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, 10 * SECONDS)
        try:
            return build(spec)
        except Exception:
            return None
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)

    yield limited


def _enter(name: str, module: ModuleType) -> None:
    sys.modules[f"ds_lgamp.schedule.{name}"] = module
    setattr(schedule, name, module)


def _give_up(number: int, frame: FrameType | None) -> None:
    raise TimeoutError
