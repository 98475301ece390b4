"""Recorded steps as one HTML file that needs nothing else: timelines to zoom into, bars and tables.

The files in page/ are its parts. They draw on a canvas, so that thousands of actions move smoothly.
"""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from itertools import count
from math import floor, log10
from typing import Any

from ds_lgamp.view.critical_path import micro_batches_of
from ds_lgamp.view.figures import COMPUTE, KINDS, Shown
from ds_lgamp.view.recording import LANES, RankRecording

PARTS = ("page.css", "d3.js", "model.js", "chart.js", "summary.js", "page.js")
"""Files of page/ that page.html names."""
DIGITS = 7
"""Of a time, as a share of the step: far more than a screen shows."""

Numbers = dict[str, int]
"""Numbers of words, in the order in which these come: pages repeat few words many times."""
Panel = tuple[str, Shown]
"""The words above a step, and the step."""


def html_page(title: str, panels: Sequence[Panel], unit: str = "s", before: str = "") -> str:
    """Returns the page with ``panels`` one above the other, on the same scale of time.

    Args:
        unit: "s" if times are seconds; "" if they have no unit.
        before: HTML that comes first on the page.
    """
    folder = files("ds_lgamp.view") / "page"
    values = {name: (folder / name).read_text(encoding="utf-8") for name in PARTS}
    # No name in the JSON can close the script element around it.
    data = json.dumps(_model(panels, unit), separators=(",", ":")).replace("<", "\\u003c")
    values |= {"title": escape(title), "before": before, "data": data}
    template = (folder / "page.html").read_text(encoding="utf-8")
    # In one pass, because what is filled in may look like a placeholder.
    return re.sub(r"{{(.*?)}}", lambda place: values[place[1]], template)


def _model(panels: Sequence[Panel], unit: str) -> dict[str, Any]:
    names, words = defaultdict[str, int](count().__next__), defaultdict[str, int](count().__next__)
    drawn = [_panel(title, shown, names, words) for title, shown in panels]
    micro_batches = max(micro_batches_of(step) for _, shown in panels for step in shown.steps)
    return {
        "unit": unit,
        "lanes": LANES,
        "kinds": KINDS,
        "computeKinds": len(COMPUTE),
        "micro_batches": micro_batches,
        "panels": drawn,
        "names": list(names),
        "words": list(words),
    }


def _panel(title: str, shown: Shown, names: Numbers, words: Numbers) -> dict[str, Any]:
    figures = shown.figures
    ranks = [_rank(rank, shown, index, names, words) for index, rank in enumerate(shown.recording.ranks)]
    return {
        "title": title,
        "seconds": figures.seconds,
        "bubble": figures.bubble,
        "by_rank": figures.by_rank,
        "peak_bytes": figures.peak_bytes,
        "critical_path": figures.critical_path,
        "placement": shown.recording.spec["placement"],
        "path": shown.path,
        "ranks": ranks,
    }


def _rank(rank: RankRecording, shown: Shown, index: int, names: Numbers, words: Numbers) -> dict[str, Any]:
    step, causes = shown.steps[index], shown.causes[index]
    lanes, titles, starts, ends, kinds, moved = zip(*step.intervals) if step.intervals else [()] * 6
    return {
        "label": f"rank {rank.rank}",
        "detail": _detail(rank, shown),
        "replica": rank.data_rank,
        "lane": [LANES.index(lane) for lane in lanes],
        "name": [names[title] for title in titles],
        "start": _since(shown, starts),
        "end": _since(shown, ends),
        "kind": [words[kind] for kind in kinds],
        "bytes": moved,
        "cause": [part for place in range(len(lanes)) for part in causes.get(place, (-1, -1))],
        "memory": [_since(shown, [when for when, _ in step.memory]), [alive for _, alive in step.memory]],
    }


def _since(shown: Shown, times: Sequence[float]) -> list[float]:
    """Returns times since the step began, rounded."""
    length = shown.figures.seconds
    places = DIGITS - floor(log10(length)) if length > 0 else DIGITS
    return [round(each - shown.start, places) for each in times]


def _detail(rank: RankRecording, shown: Shown) -> str:
    words = [f"rank {rank.rank}"]
    if len({each.data_rank for each in shown.recording.ranks}) > 1:
        words.append(f"pipeline rank {rank.pipeline_rank}, data-parallel rank {rank.data_rank}")
    return ", ".join([*words, *filter(None, (rank.host, rank.device))])
