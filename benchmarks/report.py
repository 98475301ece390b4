"""Writes the generated blocks of README.md from benchmarks/results and the pins: ``python -m benchmarks.report``."""

import json
from pathlib import Path
from typing import Any

from docs.blocks import with_block
from docs.versions import versions_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def quickstart_rows(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Label, stock and ds_lgamp of every row of the quickstart's table, the header first."""
    stock, lgamp = summary["stock"], summary["lgamp"]

    def row(label: str, key: str, form: str, scale: float = 1) -> tuple[str, str, str]:
        return label, format(stock[key] * scale, form), format(lgamp[key] * scale, form)

    return [
        ("", "stock", "ds_lgamp"),
        ("loss, first step", f"{stock['losses'][0]:.4f}", f"{lgamp['losses'][0]:.4f}"),
        ("loss, last step", f"{stock['losses'][-1]:.4f}", f"{lgamp['losses'][-1]:.4f}"),
        row("collectives per step and rank", "collectives_per_step", "d"),
        row("pipeline messages sent per step and rank", "messages_per_step", "d"),
        row("MB sent per step and rank", "bytes_per_step", ".2f", 1e-6),
        row("peak memory of tensors, MB", "peak_bytes", ".1f", 1e-6),
        row("pipeline bubble, simulated", "bubble", ".1%"),
        row("seconds per step", "step_seconds", ".2f"),
    ]


def quickstart_table() -> str:
    """The table as Markdown, from the recorded run."""
    rows = quickstart_rows(json.loads((RESULTS / "quickstart.json").read_text()))
    header, *body = [f"| {label} | {stock} | {lgamp} |" for label, stock, lgamp in rows]
    return "\n".join([header, "|---|---:|---:|", *body])


def with_blocks(text: str) -> str:
    """``text`` with every generated block brought up to date."""
    return with_block(with_block(text, "quickstart", quickstart_table()), "versions", versions_table())


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(with_blocks(readme.read_text()))


if __name__ == "__main__":
    main()
