"""Generated blocks of Markdown pages, between ``<!-- generated: NAME -->`` and ``<!-- end -->``, and their tables."""

import re
from collections.abc import Iterable, Sequence


def with_block(text: str, name: str, content: str) -> str:
    """``text`` with ``content`` in the block called ``name``. Raises ValueError if there is no such block."""
    start, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
    replaced, found = re.subn(
        f"{re.escape(start)}.*?{re.escape(end)}", lambda _: f"{start}{content}\n{end}", text, flags=re.DOTALL
    )
    if not found:
        raise ValueError(f"the page has no block '{name}'; add '{start.strip()}' and '{end}'")
    return replaced


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int | None = None) -> str:
    """A table. The columns from ``numbers_from`` on are aligned right; None aligns none."""
    aligned_left = len(header) if numbers_from is None else numbers_from
    alignment = ["---"] * aligned_left + ["---:"] * (len(header) - aligned_left)
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (header, *rows)]
    return "\n".join([f"| {lines[0]} |", f"|{'|'.join(alignment)}|", *(f"| {line} |" for line in lines[1:])])
