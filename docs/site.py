"""Builds the documentation as a site that one can read in a browser, also from a folder: ``python -m docs.site OUT``.

The pages are those of docs/, the README and the CHANGELOG. Zensical renders them (``pip install zensical``): it is the
successor of Material for MkDocs, whose support ends in May 2027. Links to files of the repository lead to pages that
show them.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from testing import ROOT

CONFIGURATION = "zensical.toml"
SHOWN = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "report.md"}
"""Pages from outside of docs/, and their names in the site."""
_LINK = re.compile(r"(?<!!)\[(?P<text>[^]]+)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_PICTURE = re.compile(r"(!\[[^]]*\]\()(?:docs/)?(plots/[^)]+\))")
_LARGEST = 100_000
"""Bytes of a file that is shown. Links to larger ones, and to folders, become plain text."""
_LANGUAGES = {".py": "python", ".sh": "bash", ".json": "json", ".txt": "text"}


class SiteError(RuntimeError):
    """The site cannot be built."""


def build(out: Path) -> None:
    """Builds the site into the new folder ``out``.

    Raises SiteError if ``out`` exists, if Zensical is not installed, and if it warns, as of a link that leads nowhere.
    """
    if out.exists():
        raise SiteError(f"{out} exists; name a new folder or delete it")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pages(folder / "pages")
        shutil.copy(ROOT / "docs" / CONFIGURATION, folder)
        # Where the command was installed, without which the folder may not be in PATH.
        command = [os.path.join(os.path.dirname(sys.executable), "zensical"), "build", "--strict"]
        try:
            ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        except FileNotFoundError:
            raise SiteError("zensical is not installed; run pip install zensical") from None
        if ended.returncode:
            raise SiteError(f"zensical refuses the pages:\n{ended.stdout}{ended.stderr}")
        shutil.copytree(folder / "site", out)


def write_pages(folder: Path) -> None:
    """Writes what Zensical reads: the pages, with links that hold in the site, files that they show, and plots."""
    names = {path: path.name for path in sorted((ROOT / "docs").glob("*.md"))}
    names |= {ROOT / source: name for source, name in SHOWN.items()}
    shutil.copytree(ROOT / "docs" / "plots", folder / "plots")
    files: set[Path] = set()
    for path, name in names.items():
        text = _with_pictures(path.read_text())
        (folder / name).write_text("".join(_with_links(path, text, names, files)))
    for file in sorted(files):
        page = folder / _page_of(file)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(_shown(file))


def _with_pictures(text: str) -> str:
    return _PICTURE.sub(r"\1\2", text)


def _with_links(page: Path, text: str, names: dict[Path, str], files: set[Path]) -> Iterator[str]:
    """Yields the text of ``page`` with the links of the site. Adds the files that it leads to, to ``files``."""
    end = 0
    for link in _LINK.finditer(text):
        yield text[end : link.start()]
        end = link.end()
        target = Path(os.path.normpath(page.parent / link["target"]))
        if "://" in link["target"]:
            yield link[0]
        elif target in names:
            yield f"[{link['text']}]({names[target]}{link['anchor'] or ''})"
        elif target.is_file() and target.stat().st_size <= _LARGEST:
            files.add(target)
            yield f"[{link['text']}]({_page_of(target)})"
        else:
            yield link["text"]
    yield text[end:]


def _page_of(file: Path) -> str:
    return f"files/{file.relative_to(ROOT)}.md"


def _shown(file: Path) -> str:
    """A page that shows a file of the repository."""
    name, text = file.relative_to(ROOT).as_posix(), file.read_text()
    if file.suffix == ".md":
        return _LINK.sub(lambda link: link["text"], text)
    return f"# {name}\n\n~~~~{_LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n~~~~\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.site", description="Builds the documentation as a site.")
    parser.add_argument("out", type=Path, help="a new folder; open index.html in it")
    try:
        build(parser.parse_args().out)
    except SiteError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
