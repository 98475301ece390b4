"""The tables of docs/configuration.md, docs/commands.md and docs/python.md, from the code."""

import argparse
import inspect
import json
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from typing import Any

import ds_lgamp
from ds_lgamp.cli.main import command_line
from ds_lgamp.cli.terminal import EXAMPLES
from ds_lgamp.config import LgampConfig
from ds_lgamp.integrations.deepspeed.config.keys import KEYS, Key, Treatment
from testing.markdown import table

HEADINGS = {
    Treatment.HONOURED: "Honoured",
    Treatment.MEANINGLESS: "Meaningless",
    Treatment.REFUSED: "Refused",
}
PUBLIC = {
    "optimizers.lamb": ("Lamb",),
    "optimizers.muon": ("Muon",),
    "view.recording": ("read_recording",),
    "view.perfetto": ("perfetto_trace",),
    "config": ("read_block",),
    "integrations.megatron.layers.gpt_layers": ("auxiliary_losses", "gpt_layer_specs", "language_model_loss"),
    "integrations.megatron.layers.gpt_weights": ("from_gpt_model", "to_gpt_model"),
    "integrations.megatron.loop.arguments": ("check_file",),
    "integrations.megatron.loop.install": ("install_schedules",),
    "integrations.megatron.loop.several_chunks": ("share_embedding",),
    "integrations.megatron.loop.sharded_model": ("ShardedChunk",),
}
"""By module, what scripts may import besides the package's own functions."""


def block_table() -> str:
    """The keys of the ``ds_lgamp`` block as a Markdown table."""
    properties = LgampConfig.model_json_schema()["properties"]
    rows = [
        (f"`{name}`", _allowed(schema), _default(schema), " ".join(schema["description"].replace("``", "`").split()))
        for name, schema in properties.items()
    ]
    return table(("key", "value", "default", "meaning"), rows)


def keys_table() -> str:
    """DeepSpeed's keys: one Markdown table per treatment."""
    return "\n\n".join(
        f"### {heading}\n\n{table(('key', 'note'), _rows(treatment))}" for treatment, heading in HEADINGS.items()
    )


def _rows(treatment: Treatment) -> Iterator[tuple[str, str]]:
    """One row for neighbours with the same note, or without a note in the same section."""
    chosen = [key for key in KEYS if key.treatment is treatment]
    for _, group in groupby(chosen, key=lambda key: (key.note or key.name.rpartition(".")[0], key.harmless, key.takes)):
        keys = list(group)
        yield ", ".join(f"`{key.name}`" for key in keys), _note(keys[0])


def _note(key: Key) -> str:
    if key.treatment is Treatment.REFUSED and key.harmless:
        return f"{key.note} (passes at {' or '.join(f'`{json.dumps(value)}`' for value in key.harmless)})"
    return "; ".join(part for part in (key.takes, key.note) if part)


def _allowed(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return ", ".join(text for text in map(_allowed, schema["anyOf"]) if text)
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if values:
        return ", ".join(f"`{json.dumps(value)}`" for value in values)
    if schema["type"] == "boolean":
        return "`true`, `false`"
    if schema["type"] == "integer":
        return f"integer from {schema['exclusiveMinimum'] + 1}" if "exclusiveMinimum" in schema else "integer"
    return "" if schema["type"] == "null" else str(schema["type"])


def _default(schema: dict[str, Any]) -> str:
    return "" if schema["default"] is None else f"`{json.dumps(schema['default'])}`"


def commands() -> str:
    """The commands and their options: a section for each command that does something."""
    return "\n\n".join(_sections(command_line()))


def _sections(parser: argparse.ArgumentParser, purpose: str = "") -> Iterator[str]:
    commands = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not commands:
        rows = [(_option(action), _meaning(action)) for action in parser._actions if action.dest != "help"]
        examples = "\n".join(EXAMPLES[parser.prog.removeprefix("ds_lgamp ")])
        yield (
            f"## {parser.prog}\n\n{purpose[:1].upper()}{purpose[1:]}.\n\n```bash\n{examples}\n```\n\n"
            f"{table(('option', 'meaning'), rows)}"
        )
    for action in commands:
        purposes = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, command in action.choices.items():
            yield from _sections(command, purposes[name])


def _option(action: argparse.Action) -> str:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    names = ", ".join(action.option_strings)
    return f"`{names or value}`" if action.nargs == 0 or not names else f"`{names} {value}`"


def _meaning(action: argparse.Action) -> str:
    meaning = (action.help or "").replace("%%", "%")
    has_default = action.option_strings and action.default not in (None, False, argparse.SUPPRESS)
    default = f"default: {action.default}" if has_default and "default" not in meaning else ""
    return "; ".join(filter(None, (meaning, default)))


def functions() -> str:
    """The functions of the package and what PUBLIC names, with their docstrings."""
    own = [function for function in vars(ds_lgamp).values() if inspect.isfunction(function)]
    own += [getattr(import_module(f"ds_lgamp.{module}"), name) for module, names in PUBLIC.items() for name in names]
    return "\n\n".join(
        f"## {each.__module__}.{each.__name__}\n\n{_as_markdown(inspect.getdoc(each) or '')}" for each in own
    )


def _as_markdown(docstring: str) -> str:
    return re.sub(r":\w+:`([^`]+)`", r"`\1`", docstring.replace("``", "`"))
