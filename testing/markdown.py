"""Tables in Markdown, for the pages and for the outcomes of public code."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int | None = None) -> str:
    """Formats a table. The columns from ``numbers_from`` on are aligned right; None aligns none."""
    aligned_left = len(header) if numbers_from is None else numbers_from
    alignment = ["---"] * aligned_left + ["---:"] * (len(header) - aligned_left)
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (header, *rows)]
    return "\n".join([f"| {lines[0]} |", f"|{'|'.join(alignment)}|", *(f"| {line} |" for line in lines[1:])])
