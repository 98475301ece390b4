"""The SVG picture of a program beside 1F1B."""

import re
from xml.etree import ElementTree

import pytest

from ds_lgamp.cli.main import main
from ds_lgamp.schedule.actions import Kind
from ds_lgamp.view.pictures import IDLE, LEFT, WIDTH, _shade

SVG = "{http://www.w3.org/2000/svg}"
BAR = re.compile(r"M([\d.]+) ([\d.]+)h([\d.]+)")


def draw(tmp_path, *options):
    """Returns the root of the picture that ``ds_lgamp schedule`` draws. Checks that it is below 60 kB."""
    path = tmp_path / "picture.svg"
    assert main(["schedule", *options, "--svg", str(path)]) == 0
    assert path.stat().st_size < 60_000
    return ElementTree.parse(path).getroot()


def bars(picture, colours):
    """Returns (left, top, width) of every bar with one of ``colours``."""
    paths = [path for path in picture.iter(f"{SVG}path") if path.get("fill") in colours]
    return [tuple(map(float, bar)) for path in paths for bar in BAR.findall(path.get("d"))]


def words(picture):
    return [text.text for text in picture.iter(f"{SVG}text")]


def shades(kind, chunks):
    return {_shade(kind, index, chunks) for index in range(chunks)}


def test_both_programs_have_their_steps_and_bubbles_on_one_scale(tmp_path):
    picture = draw(tmp_path)
    assert words(picture)[:2] == [
        "1f1b, 1 chunk per pipeline rank, 8 micro-batches",
        "step 132, bubble 37.5% of the compute time",
    ]
    assert "step 105, bubble 9.4% of the compute time" in words(picture)
    idle = bars(picture, {IDLE})
    assert len(idle) == 8 and len({top for _, top, _ in idle}) == 8, "each rank of each program has a bar"
    lengths = sorted({width for *_, width in idle})
    assert lengths == pytest.approx([(WIDTH - LEFT) * 105 / 132, WIDTH - LEFT], abs=2)


def test_both_programs_compute_equally_long(tmp_path):
    picture = draw(tmp_path)
    for kind, duration in ((Kind.FORWARD, 1), (Kind.BACKWARD, 2)):
        plain, layered = bars(picture, shades(kind, 1)), bars(picture, shades(kind, 4))
        assert (len(plain), len(layered)) == (4 * 8, 4 * 4 * 8)
        unit = (WIDTH - LEFT) / 132
        assert [width for *_, width in plain] == pytest.approx([4 * duration * unit] * len(plain), abs=1)
        assert [width for *_, width in layered] == pytest.approx([duration * unit] * len(layered), abs=1)


def test_no_two_bars_of_a_rank_overlap(tmp_path):
    picture = draw(tmp_path)
    colours = {shade for kind in (Kind.FORWARD, Kind.BACKWARD) for chunks in (1, 4) for shade in shades(kind, chunks)}
    found = sorted((top, left, width) for left, top, width in bars(picture, colours))
    assert all(left + width <= after for (top, left, width), (below, after, _) in zip(found, found[1:]) if top == below)


def test_collectives_of_1f1b_last_as_long_as_those_of_the_chunks_together(tmp_path):
    with_time, without = draw(tmp_path, "--gather", "3"), draw(tmp_path)
    steps = [re.match(r"step ([\d.]+)", words(picture)[1])[1] for picture in (with_time, without)]
    assert steps == ["144", "132"], "each rank waits for one gather of four chunks"


def test_1f1b_is_drawn_alone(tmp_path):
    picture = draw(tmp_path, "--schedule", "1f1b")
    assert len(bars(picture, {IDLE})) == 4


def test_a_file_that_cannot_be_written_is_refused_in_a_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as status:
        main(["schedule", "--svg", str(tmp_path / "missing" / "picture.svg")])
    assert status.value.code == 2
    assert "which cannot be written (No such file or directory); name another file" in capsys.readouterr().err
