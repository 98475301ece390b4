"""The documentation is a site that one can read from a folder."""

from html.parser import HTMLParser

import pytest

from docs.site import CONFIGURATION, SHOWN, SiteError, build
from testing import ROOT

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib


class Page(HTMLParser):
    """What a page of the site has for its readers and asks of the network."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.fetched = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        told = dict(attributes)
        self.anchors.add(told.get("id"))
        if tag == "a":
            self.links.append(told.get("href") or "")
        elif tag == "link" and told.get("rel") not in ("next", "prev", "canonical"):
            self.fetched.append(told.get("href") or "")
        elif "src" in told:
            self.fetched.append(told["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages of the site by their path."""
    pytest.importorskip("zensical")
    folder = tmp_path_factory.mktemp("site") / "out"
    build(folder)
    return folder, {path: Page(path.read_text()) for path in folder.rglob("*.html") if path.name != "404.html"}


def test_every_link_of_the_site_leads_to_a_place_in_it(site):
    folder, pages = site
    dead = []
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if "://" in link:
                continue
            place = (path.parent / target).resolve() if target else path
            known = pages.get(place / "index.html" if place.is_dir() else place)
            if known is None or (anchor and anchor not in known.anchors):
                dead.append(f"{path.relative_to(folder)}: {link}")
    assert not dead


def test_no_page_asks_another_host_for_anything(site):
    folder, pages = site
    for path, page in pages.items():
        for fetched in page.fetched:
            assert "//" not in fetched and (path.parent / fetched).resolve().exists(), (path, fetched)


def test_pictures_are_shown(site):
    folder, pages = site
    shown = {fetched for page in pages.values() for fetched in page.fetched}
    assert {f"plots/{plot.name}" for plot in (ROOT / "docs" / "plots").glob("*.svg")} <= shown


def entries(places):
    for place in places:
        for target in place.values():
            yield from [target] if isinstance(target, str) else entries(target)


def test_every_page_stands_in_the_navigation():
    places = tomllib.loads((ROOT / "docs" / CONFIGURATION).read_text())["project"]["nav"]
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} | set(SHOWN.values()) - {"report.md"}
    assert sorted(entries(places)) == sorted(pages)


def test_a_folder_that_exists_is_left_alone(tmp_path):
    with pytest.raises(SiteError, match="exists; name a new folder"):
        build(tmp_path)
