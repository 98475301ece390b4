"""The page in a browser: it draws, answers pointer and keys, and asks nobody for anything."""

import json
import re
from statistics import median

import pytest

from ds_lgamp.schedule.costs import Durations
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.view.figures import show
from ds_lgamp.view.pictures import html_page
from ds_lgamp.view.recording import Interval, in_order, of_simulation
from testing.browser import browser, executable

DURATIONS = Durations(forward=0.010, backward=0.020, hop=0.001, gather=0.006, reduce=0.009, update=0.004)
SHORT = (0.02, 0.03, 0.04, 0.05, 0.06)
SECONDS = 0.4
"""A redraw of 8 ranks with 2,000 actions must take less, also on two busy cores without a graphics card."""


def shown(ranks=4, chunks=2, micro_batches=8, with_memory=True):
    spec = ProgramSpec(place_chunks("modular", ranks * chunks, ranks), "layered", micro_batches, micro_batches, 3)
    recording = of_simulation(spec, simulate(spec, build_program(spec), DURATIONS), "1")
    for rank in recording.ranks if with_memory else ():
        ends = [each.end for each in rank.steps[0].intervals if each.lane == "compute"]
        rank.steps[0] = rank.steps[0]._replace(memory=[(end, 10**6 * number) for number, end in enumerate(ends)])
    return show(recording)


def page_of(*steps, title="a page"):
    return html_page(title, [(f"panel {number}", step) for number, step in enumerate(steps)])


@pytest.fixture(scope="module")
def window():
    path = executable()
    if path is None:
        pytest.skip("no Chromium is installed; CONTRIBUTING.md says how to get one")
    with browser(path) as started:
        yield started


@pytest.fixture
def opened(window, tmp_path):
    """Returns a function that opens a page of steps, and checks in the end that the console is empty and that nothing
    but the file was asked for."""

    def open_page(text, **options):
        (tmp_path / "page.html").write_text(text, encoding="utf-8")
        window.open(tmp_path / "page.html", **options)
        window.frame()
        return window

    yield open_page
    assert window.problems == []
    assert [address.rpartition("/")[2] for address in window.requests] == ["page.html"]


def point(window, row, moment, down="row.height / 2"):
    """Returns where a row of the chart shows a moment, in the window; both in JavaScript."""
    return window.evaluate(
        f"""(() => {{
            const row = rows.find((each) => {row}), box = canvas.getBoundingClientRect();
            return [box.left + scale()({moment}), box.top + row.top + {down} - scroller.scrollTop];
        }})()"""
    )


def where(window, name, rank=0):
    """Returns the middle of a drawn interval, in whole pixels of the window."""
    index = f'row.rank.lanes[COMPUTE].find((each) => row.rank.about[each].name === "{name}")'
    middle = f"(row.rank.start[{index}] + row.rank.end[{index}]) / 2"
    return list(map(round, point(window, f'each.kind === "compute" && each.index === {rank}', middle)))


def colour_at(window, place, up=8):
    """Returns red, green and blue of the canvas ``up`` pixels above a place in the window."""
    x, y = place
    return window.evaluate(
        f"""(() => {{
            const box = canvas.getBoundingClientRect();
            const copy = new OffscreenCanvas(1, 1).getContext("2d", {{ willReadFrequently: true }});
            copy.drawImage(canvas, Math.round(box.left - {x}), Math.round(box.top - {y} + {up}));
            return [...copy.getImageData(0, 0, 1, 1).data].slice(0, 3);
        }})()"""
    )


def corner(window):
    """Returns the colour of the canvas where nothing is drawn."""
    x, y = window.evaluate("[canvas.getBoundingClientRect().left, canvas.getBoundingClientRect().top]")
    return colour_at(window, (x + 2, y + 2), up=0)


def moment_at(window, place):
    return window.evaluate(f"scale().invert({place[0]} - canvas.getBoundingClientRect().left)")


def seen(window):
    """Returns the times at the left and the right edge."""
    return [float(each) for each in window.evaluate("canvas.dataset.seen").split()]


def told(window):
    return window.evaluate("tip.hidden ? '' : tip.innerText")


def test_a_forward_is_blue_a_backward_orange_and_the_sentence_tells_the_shares(opened):
    window = opened(page_of(shown()))
    red, _, blue = colour_at(window, where(window, "F0.3"))
    assert blue > 200 > red
    red, _, blue = colour_at(window, where(window, "B0.3"))
    assert red > 180 > blue
    assert window.evaluate("summary.innerText").startswith(
        "panel 0: 599 ms. The ranks compute 81.5 % of it, wait 13.3 %, most for gradients (8.0 %), and idle 5.3 %."
    )


def test_the_table_has_each_kind_of_each_step(opened):
    window = opened(page_of(shown(), shown(micro_batches=4)))
    rows = [row.split("\t") for row in window.evaluate("document.querySelector('table').innerText").split("\n")]
    cells = {row[0].strip(): row[1:] for row in rows}
    assert cells["forward"] == ["160 ms", "26.7 %", "160 ms on 0", "80 ms", "21.8 %", "80 ms on 0"]
    assert cells["gradient"][2] == "96 ms on 0" and cells["whole step"][0] == "599 ms"


def test_hovering_tells_what_an_action_is_and_what_it_waited_for(opened):
    window = opened(page_of(shown()))
    window.mouse("mouseMoved", *where(window, "B4.2"))
    words = told(window).split("\n\n")
    assert words[:3] == ["B4.2", "backward, chunk 4, micro-batch 2", "20 ms: from 252 ms to 272 ms"]
    assert words[-2:] == ["began after SEND_B5.2 of rank 1", "waited before: 10 ms for gradient"]
    window.mouse("mouseMoved", *where(window, "B0.2"))
    assert "began after B0.1" in told(window) and "waited" not in told(window)
    window.mouse("mouseMoved", 5, 5)
    assert told(window) == ""


def test_only_waits_count_as_waits(opened):
    """Of the 9 ms ahead of the compute, 5 are waits."""
    recording = shown(with_memory=False).recording
    (first,) = recording.ranks[0].steps
    late = next(each.start for each in first.intervals if each.name == "F0.1" and each.lane == "compute")
    moved = [
        each._replace(start=each.start + 0.009, end=each.end + 0.009) if each.start >= late else each
        for each in first.intervals
    ]
    waits = [
        Interval("wait", "WAIT_GATHER0", late + 0.001, late + 0.003, "gather"),
        Interval("wait", "SEND_F0.0", late + 0.004, late + 0.007, "send"),
    ]
    recording.ranks[0].steps = [first._replace(intervals=in_order([*moved, *waits]), end=first.end + 0.009)]
    window = opened(page_of(show(recording)))
    window.mouse("mouseMoved", *where(window, "F0.1"))
    assert "waited before: 2 ms for gather, 3 ms for send" in told(window).split("\n\n")


def test_what_began_long_ago_is_drawn_and_found_wherever_one_zooms_in(opened):
    """A long reduction goes on behind a short one that began later."""
    recording = shown(2, 1, 2, with_memory=False).recording
    (first,) = recording.ranks[0].steps
    lanes = [Interval("reduce", "REDUCE0", 0.01, 0.09), *(Interval("reduce", "REDUCE0", t, t + 0.001) for t in SHORT)]
    others = [each for each in first.intervals if each.lane != "reduce"]
    recording.ranks[0].steps = [first._replace(intervals=in_order([*others, *lanes]))]
    window = opened(page_of(show(recording)))
    window.evaluate("zoom.scaleTo(selection, 40); zoom.translateTo(selection, wholeScale()(0.07), 0)")
    window.frame()
    row = 'each.index === 0 && each.lanes[0] === model.lanes.indexOf("reduce")'
    place = list(map(round, point(window, row, "0.07")))
    assert colour_at(window, place, up=0) == [189, 76, 134]
    window.mouse("mouseMoved", *place)
    assert told(window).startswith("REDUCE0")


def test_words_can_be_read_on_every_colour(opened):
    window = opened(page_of(shown(2, 4)))
    contrasts = window.evaluate(
        """["forward", "backward"].flatMap((kind) => [0, 1 / 3, 2 / 3, 1].map((place) => [kind, place]))
            .concat(Object.keys(COLOURS).map((kind) => [kind, 0.55])).map(([kind, place]) => {
                const ground = luminance(kind in HUES ? shade(kind, place) : colour(kind));
                const [low, high] = [luminance(ink(kind, place)), ground].sort((a, b) => a - b);
                return (high + 0.05) / (low + 0.05);
            })"""
    )
    assert min(contrasts) > 4.5, "WCAG AA"


def test_the_chosen_action_stays_chosen_where_rows_move(opened):
    window = opened(page_of(shown()))
    window.evaluate("canvas.focus()")
    for key in ("ArrowRight", "ArrowDown", "ArrowDown"):
        window.key(key)
    window.evaluate("document.getElementById('lanes').click()")
    window.key("ArrowDown")
    assert window.evaluate("state.shown.row.index") == 3 and window.evaluate("rows.includes(state.shown.row)")


def test_the_wheel_zooms_where_the_pointer_is_and_dragging_moves(opened):
    window = opened(page_of(shown()))
    whole = seen(window)
    place = where(window, "B4.2")
    moment = moment_at(window, place)
    for _ in range(4):
        window.mouse("mouseWheel", *place, deltaX=0, deltaY=-100, modifiers=2)
    start, end = seen(window)
    assert end - start < 0.25 * (whole[1] - whole[0])
    assert moment_at(window, place) == pytest.approx(moment)
    window.mouse("mousePressed", *place, button="left", buttons=1, clickCount=1)
    window.mouse("mouseMoved", place[0] + 100, place[1], button="left", buttons=1)
    window.mouse("mouseReleased", place[0] + 100, place[1], button="left", clickCount=1)
    assert moment_at(window, (place[0] + 100, place[1])) == pytest.approx(moment)
    window.evaluate("document.getElementById('whole').click()")
    window.frame()
    assert seen(window) == whole


def test_a_wheel_without_ctrl_scrolls_the_page(opened):
    window = opened(page_of(shown()))
    whole = seen(window)
    window.mouse("mouseWheel", *where(window, "B4.2"), deltaX=0, deltaY=100)
    assert seen(window) == whole


def test_a_click_follows_the_micro_batch_through_all_ranks(opened):
    window = opened(page_of(shown()))
    bright = colour_at(window, where(window, "F0.5"))
    window.click(*where(window, "F4.2", 0))
    window.frame()
    assert window.evaluate("chooser.value") == "2"
    assert colour_at(window, where(window, "F0.2")) == bright, "the same chunk, of the micro-batch that is followed"
    assert colour_at(window, where(window, "F0.5")) != bright, "another micro-batch is faint"
    names = window.evaluate(
        """model.panels[0].ofMicroBatch(2).map((places) =>
            places.map(([rank, index]) => model.panels[0].ranks[rank].about[index].name))"""
    )
    assert names == [[*(f"F{chunk}.2" for chunk in range(8)), *(f"B{chunk}.2" for chunk in reversed(range(8)))]]
    window.click(*where(window, "F4.2", 0))
    assert window.evaluate("chooser.value") == ""


def test_the_critical_path_stays_bright(opened):
    window = opened(page_of(shown()))
    on, off = where(window, "B0.3"), where(window, "B3.3", 3)
    before = colour_at(window, on), colour_at(window, off)
    window.evaluate("document.getElementById('path').click()")
    window.frame()
    assert colour_at(window, on) == before[0] and colour_at(window, off) != before[1]


def test_keys_walk_over_actions_and_tell_them(opened):
    window = opened(page_of(shown()))
    window.evaluate("canvas.focus()")
    for key, name in {"ArrowRight": "F0.0", "ArrowDown": "F1.0", "ArrowUp": "F0.2", "ArrowLeft": "F0.1"}.items():
        window.key(key)
        assert window.evaluate("document.getElementById('announcement').textContent").startswith(name), key
    window.key("Enter")
    assert window.evaluate("chooser.value") == "1"
    window.key("c")
    window.key("+")
    assert window.evaluate("state.path") and seen(window)[1] < 0.599
    window.key("0")
    window.key("Escape")
    assert window.evaluate("chooser.value") == "" and not window.evaluate("state.path")


def test_memory_is_drawn_where_it_is_known_and_told(opened):
    window = opened(page_of(shown(), shown(with_memory=False)))
    assert window.evaluate("rows.filter((row) => row.kind === 'memory').length") == 4
    place = point(window, 'each.kind === "memory"', "0.5", "row.height - 3")
    window.mouse("mouseMoved", *place)
    assert re.match(r"\d+ MB\n\nrank 0, at 500 ms; most: 32 MB", told(window))


def test_two_steps_share_a_scale_of_time(opened):
    window = opened(page_of(shown(), shown(micro_batches=4)))
    short = window.evaluate("model.panels[1].seconds")
    assert seen(window) == pytest.approx([0, 0.599], abs=1e-3) and short < 0.37
    assert window.evaluate("rows.filter((row) => row.kind === 'title').map((row) => row.panel.title)") == [
        "panel 0",
        "panel 1",
    ]


def test_dark_and_light_pages_differ(opened):
    window = opened(page_of(shown()), dark=True)
    assert max(corner(window)) < 40
    window = opened(page_of(shown()))
    assert min(corner(window)) > 240


def test_names_cannot_break_the_page(opened):
    step = shown()
    step.recording.ranks[0].host = "</script><script>console.error('no')</script>{{data}}"
    window = opened(page_of(step, title="<b>{{data}}</b> & co"))
    assert window.evaluate("document.title") == "<b>{{data}}</b> & co"
    assert window.evaluate("model.panels[0].ranks[0].detail").endswith("{{data}}")


def test_64_ranks_are_drawn_compactly(opened):
    window = opened(page_of(shown(64, 1, 16)))
    assert window.evaluate("height") < 900 and window.evaluate("rows.length") == 65


@pytest.mark.timing
def test_a_zoom_of_8_ranks_with_2000_actions_is_redrawn_in_time(opened):
    step = shown(8, 16, 64)
    assert min(sum(each.lane == "compute" for each in rank.intervals) for rank in step.steps) > 2000
    window = opened(page_of(step))
    times = window.evaluate(
        """const reader = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
        [1, 1.5, 2, 4, 8, 16, 32].map((factor) => {
            state.zoom = d3.zoomIdentity.scale(factor);
            const start = performance.now();
            draw();
            reader.drawImage(canvas, 0, 0);
            reader.getImageData(0, 0, 1, 1);
            return (performance.now() - start) / 1000;
        })"""
    )
    assert median(times) < SECONDS, times


def test_a_page_holds_all_it_needs():
    text = page_of(shown())
    model = json.loads(re.search(r'type="application/json">(.*?)</script>', text)[1])
    assert model["panels"][0]["placement"] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert not re.search(r"(?:src|href)\s*=|@import|url\(", text.replace("url(#", ""))
    assert "Permission to use, copy, modify" in text and len(text) < 300_000
