"""Steps as pictures, on one scale of time: simulated programs as SVG, and steps as one HTML file that needs nothing
else, with timelines to zoom into, bars and tables.

The files in page/ are its parts. They draw on a canvas, so that thousands of actions move smoothly.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from colorsys import hls_to_rgb
from dataclasses import replace
from html import escape
from importlib.resources import files
from itertools import count
from math import floor, log10
from typing import Any, NamedTuple

from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.costs import Durations
from ds_lgamp.schedule.orders import chunks_of
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import Timeline, simulate
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.view.critical_path import micro_batches_of
from ds_lgamp.view.figures import COMPUTE_KINDS, KINDS, Shown
from ds_lgamp.view.recording import LANES, RankRecording

WIDTH, LEFT, TOP = 960, 64, 34
"""Pixels: the width of the picture and of the names of ranks, and the height of a panel's title."""
ROW, BAR, GAP = 24, 20, 18
"""Pixels: from one rank to the next, the height of its bar, and the space below a panel."""
# These greys and hues stand out from white and from black: a picture cannot know the page's background.
TEXT, IDLE, UPDATE = "#768390", "#8b949e", "#2f9e62"
HUES = {Kind.FORWARD: (0.59, 0.75), Kind.BACKWARD: (0.08, 0.88)}
"""Hue and saturation: blue and orange, which colour-blind readers tell apart."""
PALE = 0.55
"""Opacity of the second parts of backwards."""
LIGHTEST, DARKEST = 0.74, 0.42
"""Lightness of a rank's first and last chunk."""


class Panel(NamedTuple):
    """A simulated program and the words above it."""

    title: str
    spec: ProgramSpec
    timeline: Timeline


def beside_1f1b(spec: ProgramSpec, timeline: Timeline, durations: Durations) -> list[Panel]:
    """Returns a panel of 1F1B with the same work, and one of the simulated program after it.

    1F1B has one chunk per pipeline rank, which takes as long as the chunks of ``spec`` on a rank. A 1F1B program has
    one panel.
    """
    own = Panel(title_of(spec), spec, timeline)
    if spec.schedule == "1f1b":
        return [own]
    ranks = spec.pipeline_ranks
    length = spec.chunks / ranks
    # A message, and an input on the host, is as large as before.
    of_layers = set(Durations._fields) - {"hop", "message", "input", "weights_backward"}
    longer = durations._replace(**{name: getattr(durations, name) * length for name in of_layers})
    plain = replace(
        spec,
        placement=place_chunks("contiguous", ranks, ranks),
        schedule="1f1b",
        micro_batch_group=spec.micro_batches,
        split_backward=0,
    )
    return [Panel(title_of(plain), plain, simulate(plain, build_program(plain), longer)), own]


def title_of(spec: ProgramSpec) -> str:
    """Returns a program in words."""
    chunks = spec.chunks // spec.pipeline_ranks
    each = "1 chunk" if chunks == 1 else f"{chunks} chunks"
    return f"{spec.schedule}, {each} per pipeline rank, {spec.micro_batches} micro-batches"


def svg_gantt(panels: Sequence[Panel]) -> str:
    """Returns an SVG picture of ``panels``, one above the other, with a legend.

    Each pipeline rank has a bar, with time from left to right. Forwards are blue, backwards orange and their second
    parts pale, later chunks of the rank darker, updates green. Grey is idle time: the bubble and waits for collectives.
    """
    longest = max(panel.timeline.step_time for panel in panels)
    scale = (WIDTH - LEFT - 1) / longest if longest else 0.0
    lines: list[str] = []
    top = 0
    for panel in panels:
        lines.extend(_panel(panel, top, scale))
        top += TOP + len(panel.timeline.spans) * ROW + GAP
    lines.extend(_legend(top, any(any(panel.timeline.updates) for panel in panels)))
    height = top + BAR + 4
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
            f' font-family="sans-serif" font-size="14" fill="{TEXT}">',
            f"<title>{escape(' beside '.join(panel.title for panel in panels))}</title>",
            *lines,
            "</svg>\n",
        ]
    )


def _panel(panel: Panel, top: float, scale: float) -> Iterator[str]:
    """Yields the title, and a bar for each rank."""
    timeline, step = panel.timeline, panel.timeline.step_time
    yield f'<text x="0" y="{top + 22}" font-weight="bold">{escape(panel.title)}</text>'
    yield (
        f'<text x="{WIDTH}" y="{top + 22}" text-anchor="end">step {step:g}, bubble {timeline.bubble:.1%}'
        " of the compute time</text>"
    )
    for rank, spans in enumerate(timeline.spans):
        bar = top + TOP + rank * ROW
        yield f'<text x="0" y="{bar + 15}">rank {rank}</text>'
        yield _bars(IDLE, [(0.0, step)], bar, scale, opacity=0.3)
        if timeline.updates[rank]:
            yield _bars(UPDATE, [(span.start, span.end) for span in timeline.updates[rank]], bar, scale)
        chunks = chunks_of(panel.spec.placement, rank)
        for kind in HUES:
            for index, chunk in enumerate(chunks):
                times = [(span.start, span.end) for span in spans if span.action[:2] == (kind, chunk)]
                yield _bars(_shade(kind, index, len(chunks)), times, bar, scale)
        for index, chunk in enumerate(chunks) if panel.spec.split_chunks else ():
            second_part = Kind.WEIGHTS_BACKWARD, chunk
            times = [(span.start, span.end) for span in spans if span.action[:2] == second_part]
            yield _bars(_shade(Kind.BACKWARD, index, len(chunks)), times, bar, scale, PALE)


def _bars(fill: str, times: Iterable[tuple[float, float]], top: float, scale: float, opacity: float = 1.0) -> str:
    """Returns a path of a rectangle for each start and end; a slit parts neighbours."""
    parts = (
        f"M{LEFT + start * scale:.1f} {top:g}h{max((end - start) * scale - 0.8, 0.2):.1f}v{BAR}H"
        f"{LEFT + start * scale:.1f}z"
        for start, end in times
    )
    transparent = "" if opacity == 1 else f' fill-opacity="{opacity}"'
    return f'<path fill="{fill}"{transparent} d="{"".join(parts)}"/>'


def _shade(kind: Kind, index: int, chunks: int) -> str:
    hue, saturation = HUES[kind]
    share = index / (chunks - 1) if chunks > 1 else 0.5
    channels = hls_to_rgb(hue, LIGHTEST + (DARKEST - LIGHTEST) * share, saturation)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def _legend(top: float, with_updates: bool) -> Iterator[str]:
    """Yields what the colours mean."""
    left = LEFT
    for kind, word in ((Kind.FORWARD, "forward"), (Kind.BACKWARD, "backward")):
        for index in range(2):
            yield f'<rect x="{left + index * 20}" y="{top}" width="20" height="{BAR}" fill="{_shade(kind, index, 2)}"/>'
        yield f'<text x="{left + 48}" y="{top + 15}">{word}: first to last chunk of the rank</text>'
        left += 320
    yield f'<rect x="{left}" y="{top}" width="40" height="{BAR}" fill="{IDLE}" fill-opacity="0.3"/>'
    yield f'<text x="{left + 48}" y="{top + 15}">idle</text>'
    if with_updates:
        yield f'<rect x="{left + 104}" y="{top}" width="40" height="{BAR}" fill="{UPDATE}"/>'
        yield f'<text x="{left + 152}" y="{top + 15}">update</text>'


PARTS = ("page.css", "d3.js", "model.js", "chart.js", "summary.js", "page.js")
"""Files of page/ that page.html names."""
DIGITS = 7
"""Of a time, as a share of the step: far more than a screen shows."""

Numbers = dict[str, int]
"""Numbers of words, in the order in which these come: pages repeat few words many times."""
Titled = tuple[str, Shown]
"""The words above a step, and the step."""


def html_page(title: str, panels: Sequence[Titled], unit: str = "s", before: str = "") -> str:
    """Returns the page with ``panels`` one above the other, on the same scale of time.

    Args:
        unit: "s" if times are seconds; "" if they have no unit.
        before: HTML that comes first on the page.
    """
    folder = files("ds_lgamp.view") / "page"
    values = {name: (folder / name).read_text(encoding="utf-8") for name in PARTS}
    # No name in the JSON can close the script element around it.
    data = json.dumps(_page_data(panels, unit), separators=(",", ":")).replace("<", "\\u003c")
    values |= {"title": escape(title), "before": before, "data": data}
    template = (folder / "page.html").read_text(encoding="utf-8")
    # In one pass, because what is filled in may look like a placeholder.
    return re.sub(r"{{(.*?)}}", lambda place: values[place[1]], template)


def _page_data(panels: Sequence[Titled], unit: str) -> dict[str, Any]:
    names, words = defaultdict[str, int](count().__next__), defaultdict[str, int](count().__next__)
    drawn = [_panel_data(title, shown, names, words) for title, shown in panels]
    micro_batches = max(micro_batches_of(step) for _, shown in panels for step in shown.steps)
    return {
        "unit": unit,
        "lanes": LANES,
        "kinds": KINDS,
        "computeKinds": len(COMPUTE_KINDS),
        "micro_batches": micro_batches,
        "panels": drawn,
        "names": list(names),
        "words": list(words),
    }


def _panel_data(title: str, shown: Shown, names: Numbers, words: Numbers) -> dict[str, Any]:
    figures = shown.figures
    ranks = [_rank_data(rank, shown, index, names, words) for index, rank in enumerate(shown.recording.ranks)]
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


def _rank_data(rank: RankRecording, shown: Shown, index: int, names: Numbers, words: Numbers) -> dict[str, Any]:
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
