"""The tables of docs/troubleshooting.md: every message of an error, from the code that raises it."""

import ast
import re
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

from testing import ROOT
from testing.markdown import table

VALUE = "…"
"""Stands for what a message tells of the moment."""
PACKAGE = ROOT / "ds_lgamp"
_MOST_WAYS = 12
"""How many texts one place may have; more are alternatives of a part, which then stands as ``VALUE``."""
_COMMON = {"is", "but", "write", "use", "one", "of"}
"""A message of these words and values says nothing that anybody could look for."""
_RAISING = {"raise_everywhere": 0, "absent": -1}
"""Functions that raise one of their arguments, on every rank or later, and its place."""

SECTIONS: dict[str, tuple[str, ...]] = {
    "configuration": (
        "config.py",
        "integrations/deepspeed/config/",
        "integrations/program_spec.py",
        "integrations/cluster_file.py",
    ),
    "engine": ("integrations/",),
    "models": ("integrations/transformers/", "integrations/deepspeed/plain/"),
    "megatron": ("integrations/megatron/",),
    "checkpoints": ("checkpoint/", "integrations/deepspeed/checkpoint/"),
    "training": ("runtime/", "watch/", "partition/", "optimizers/"),
    "commands": ("cli/", "fields.py", "planner/", "cost/", "view/"),
    "programs": ("schedule/",),
}
"""The sections of the page, and the files whose messages they show. The longest prefix counts."""


class Raised(NamedTuple):
    """A place that raises an error."""

    file: str
    """In the package."""
    line: int
    code: str
    texts: tuple[str, ...]
    """What it may say, with ``VALUE`` for parts that vary; none if it passes on what others said."""


class Module:
    """A module's syntax, in which texts are looked up."""

    def __init__(self, path: Path) -> None:
        self.file = path.relative_to(PACKAGE).as_posix()
        self._tree = ast.parse(path.read_text())

    def raised(self) -> Iterator[Raised]:
        """Yields the places that raise errors for users, without those that raise an error again."""
        for node in self._nodes:
            said = _said(node)
            if said is not None:
                texts = tuple(dict.fromkeys(text for text in self.texts(said, self._scope_of(node)) if text))
                yield Raised(self.file, node.lineno, ast.unparse(said), texts)  # type: ignore[attr-defined]

    def texts(self, said: ast.expr, scope: ast.AST, depth: int = 0) -> list[str]:
        """Returns the texts that an expression may have; none if it is no text that stands here."""
        match said:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                return _joined(
                    [self._part(part, scope, depth) for part in parts], [ast.unparse(part) for part in parts]
                )
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return _joined([self.texts(side, scope, depth) or [VALUE] for side in (left, right)], (left, right))
            case ast.IfExp(body=body, orelse=orelse):
                return self.texts(body, scope, depth) + self.texts(orelse, scope, depth)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="format")):
                return [_with_values(text) for text in self._constant(name, depth)]
            case ast.Call(func=ast.Name(id="next") | ast.Call(func=ast.Name(id="type")), args=[first, *_]):
                return self.texts(first, scope, depth)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=arguments):
                # An OSError has a number ahead of its text.
                texts = (self.texts(argument, scope, depth) for argument in arguments[:2])
                first = next(filter(None, texts), [])
                # An error's own words stand in the call, a function's in its body or in both.
                if name.lstrip("_")[0].isupper():
                    return first or self._made_by(name, depth)
                # A word alone is a key that a function looks up.
                passed_on = [text for text in first if " " in text] if name in self._functions else []
                return self._made_by(name, depth) or passed_on
            case ast.Name(id=name):
                return self._assigned(name, scope, depth) or self._constant(name, depth)
        return []

    def _part(self, part: ast.expr, scope: ast.AST, depth: int) -> list[str]:
        if not isinstance(part, ast.FormattedValue):
            return self.texts(part, scope, depth)
        inner = part.value
        found = self.texts(inner, scope, depth + 1) if isinstance(inner, ast.Name | ast.IfExp) else []
        return found if 0 < len(found) <= 2 else [VALUE]

    def _made_by(self, name: str, depth: int) -> list[str]:
        """The texts that the function ``name`` returns, or that errors of the class ``name`` have of their own."""
        made = self._functions.get(name) or self._classes.get(name)
        if made is None and depth == 0:
            others = [module for module in modules() if name in module._functions or name in module._classes]
            return others[0]._made_by(name, 1) if len(others) == 1 else []
        if made is None or depth > 3:
            return []
        if isinstance(made, ast.ClassDef):
            calls = [node for node in ast.walk(made) if isinstance(node, ast.Call)]
            values = [call.args[0] for call in calls if ast.unparse(call.func) == "super().__init__" and call.args]
        else:
            values = [each.value for each in ast.walk(made) if isinstance(each, ast.Return | ast.Yield) and each.value]
        return [text for value in values for text in self.texts(value, made, depth + 1)]

    def _assigned(self, name: str, scope: ast.AST, depth: int) -> list[str]:
        if depth > 3 or scope is self._tree:
            return []
        values = [
            node.value
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets)
        ]
        return [text for value in values for text in self.texts(value, scope, depth + 1)]

    def _constant(self, name: str, depth: int) -> list[str]:
        """The text of a constant of this module, or of the only one that has a constant of this name."""
        others = [module for module in modules() if name in module._constants and name not in self._assigned_here]
        imported = [module for module in others if module.file == self._imported.get(name)]
        owners = [self] if name in self._constants else imported or others
        if len(owners) != 1 or depth > 3:
            return []
        return owners[0].texts(owners[0]._constants[name], owners[0]._tree, depth + 1)

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        return list(ast.walk(self._tree))

    @cached_property
    def _constants(self) -> dict[str, ast.expr]:
        named = self._assigned_here.items()
        return {name: value for name, value in named if isinstance(value, ast.Constant | ast.JoinedStr)}

    @cached_property
    def _imported(self) -> dict[str, str]:
        """The files of the package from which names are imported."""
        imports = [node for node in self._tree.body if isinstance(node, ast.ImportFrom) and node.module]
        files = {node: f"{str(node.module).partition('.')[2].replace('.', '/')}.py" for node in imports}
        return {each.name: file for node, file in files.items() for each in node.names}

    @cached_property
    def _assigned_here(self) -> dict[str, ast.expr]:
        """What names of the module are set to, those of a tuple (``A, B = "a", "b"``) too."""
        named: dict[str, ast.expr] = {}
        for node in self._tree.body:
            for to in node.targets if isinstance(node, ast.Assign) else ():
                several = isinstance(to, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs = zip(to.elts, node.value.elts) if several else ((to, node.value),)  # type: ignore[attr-defined]
                named.update({each.id: value for each, value in pairs if isinstance(each, ast.Name)})
        return named

    @cached_property
    def _functions(self) -> dict[str, ast.FunctionDef]:
        return {node.name: node for node in self._nodes if isinstance(node, ast.FunctionDef)}

    @cached_property
    def _classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self._nodes if isinstance(node, ast.ClassDef)}

    def _scope_of(self, node: ast.AST) -> ast.AST:
        """The innermost function around ``node``; the module if there is none."""
        around = [
            function
            for function in self._functions.values()
            if function.lineno <= node.lineno <= (function.end_lineno or 0)  # type: ignore[attr-defined]
        ]
        return max(around, key=lambda function: function.lineno, default=self._tree)


def _said(node: ast.AST) -> ast.expr | None:
    """Returns what a statement raises, as an expression with a text; None if it raises nothing for users."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _RAISING:
        return node.args[_RAISING[node.func.id]]
    if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
        # Raises again what was caught, or an error without words, as StopIteration.
        return None
    kind = ast.unparse(node.exc.func)
    internal = kind.rpartition(".")[2].startswith("_") and kind.rpartition(".")[2][1:2].isupper()
    return None if internal or kind in ("SystemExit", "StopIteration") else node.exc


def _joined(parts: list[list[str]], codes: Sequence[Hashable]) -> list[str]:
    """Every way to put one text of each part behind the other. Parts of the same code have the same text."""
    choices: dict[Hashable, list[str]] = {}
    ways = 1
    for code, part in zip(codes, parts):
        if code not in choices:
            ways *= max(1, len(part))
            choices[code] = part if len(part) == 1 or (part and ways <= _MOST_WAYS) else [VALUE]
    chosen = (dict(zip(choices, texts)) for texts in product(*choices.values()))
    return ["".join(texts[code] for code in codes) for texts in chosen]


def _with_values(text: str) -> str:
    before, *rest = text.split("{")
    return before + "".join(VALUE + piece.partition("}")[2] for piece in rest)


@lru_cache(maxsize=1)
def modules() -> list[Module]:
    return [Module(path) for path in sorted(PACKAGE.rglob("*.py"))]


@lru_cache(maxsize=1)
def raised() -> list[Raised]:
    """Returns every place of the package that raises an error for users."""
    return [place for module in modules() for place in module.raised()]


def section_of(file: str) -> str:
    fitting = ((len(prefix), name) for name, files in SECTIONS.items() for prefix in files if file.startswith(prefix))
    return max(fitting)[1]


def messages(section: str) -> str:
    """The messages of a section: what each says, and what it asks to do."""
    texts = {text for place in raised() if section_of(place.file) == section for text in place.texts}
    texts.update(_of_tables(section))
    # A word alone is the argument of a function that passes on an error.
    split = map(_split, (text for text in texts if " " in text and set(re.findall(r"\w+", text)) - _COMMON))
    rows = sorted(split, key=lambda row: (row[0].lstrip(f"{VALUE} '").lower(), row))
    return table(["message", "what to do"], rows)


def _of_tables(section: str) -> Iterator[str]:
    """Yields the messages of which the code has a table."""
    if section == "megatron":
        from ds_lgamp.integrations.megatron.loop.arguments import REFUSED_KEYS
        from ds_lgamp.integrations.megatron.loop.batch import OF_ONE_CHUNK, TOO_FEW_RANKS

        yield from (f"ds_lgamp.{key} is {VALUE}, {reason}" for key, (_, reason) in REFUSED_KEYS.items())
        yield from (f"{name} is {VALUE}, whose {reason}; {TOO_FEW_RANKS}" for name, reason in OF_ONE_CHUNK.items())


def _split(text: str) -> tuple[str, str]:
    """Cuts a message ahead of its advice: at the first semicolon, unless only a value stands there."""
    said, _, advice = " ".join(text.split()).replace("<", "&lt;").partition("; ")
    if said == VALUE and "; " in advice:
        more, _, advice = advice.partition("; ")
        said = f"{said}; {more}"
    return said, advice
