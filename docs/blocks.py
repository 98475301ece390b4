"""Generated blocks of Markdown pages, between ``<!-- generated: NAME -->`` and ``<!-- end -->``."""

import re


def with_block(text: str, name: str, content: str) -> str:
    """Returns ``text`` with ``content`` in the block ``name``. Raises ValueError if ``text`` has no such block."""
    start, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
    replaced, found = re.subn(
        f"{re.escape(start)}.*?{re.escape(end)}", lambda _: f"{start}{content}\n{end}", text, flags=re.DOTALL
    )
    if not found:
        raise ValueError(f"the page has no block '{name}'; add '{start.strip()}' and '{end}'")
    return replaced
