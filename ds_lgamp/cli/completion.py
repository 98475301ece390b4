"""Tells shtab, which writes completions for shells, which arguments are paths."""

import argparse

PATHS = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
"""What completes a path, by shell. Without it, shtab's scripts complete no paths."""
_OF_PATHS = ("FILE", "DIR", "DIR[/TAG]", "DIR/TAG", "SOURCE", "TARGET", "FOLDER", "RECORDING", "SCRIPT", "OTHER")


def complete_paths(parser: argparse.ArgumentParser) -> None:
    """Marks the arguments of ``parser``, and of its commands, whose metavar names a path."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                complete_paths(command)
        elif isinstance(action.metavar, str) and set(action.metavar.split("|")) & set(_OF_PATHS):
            action.complete = PATHS  # type: ignore[attr-defined]
