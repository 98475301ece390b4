"""The versions that are tested together, for the table in docs/overview.md."""

import re
from pathlib import Path

from testing.markdown import table

ROOT = Path(__file__).parents[1]
COLUMNS = {"torch": "torch", "deepspeed": "DeepSpeed", "megatron-core": "Megatron-core"}
"""The name that users know, by package."""


def versions_table() -> str:
    """The table as Markdown: the Python that runs in CI, and the pins that every test run installs."""
    pins = pinned_versions()
    return table(["Python", *COLUMNS.values()], [[python_of_ci(), *(pins[package] for package in COLUMNS)]])


def pinned_versions() -> dict[str, str]:
    """Version of every package in launch/constraints.txt."""
    text = (ROOT / "launch" / "constraints.txt").read_text()
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE))


def python_of_ci() -> str:
    """The Python version that the workflow sets up."""
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    (version,) = re.findall(r'^ +python-version: "([\d.]+)"$', workflow.read_text(), re.MULTILINE)
    return version
