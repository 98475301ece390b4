"""``ds_lgamp view`` and ``ds_lgamp schedule --html``."""

import json
import re
import subprocess
import sys

import pytest

from ds_lgamp.cli.main import main
from ds_lgamp.schedule.costs import Durations
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.view.perfetto import perfetto_trace
from ds_lgamp.view.recording import of_simulation, read_recording, write_recording

SPEC = ProgramSpec(place_chunks("modular", 4, 2), "layered", 4, 4, 3)


@pytest.fixture
def recording(tmp_path):
    """A folder with three steps that stand for measured ones; the second is the median."""
    made = of_simulation(SPEC, simulate(SPEC, build_program(SPEC), Durations(gather=1, reduce=2)), "1")
    made.source = "measured"
    for rank in made.ranks:
        (step,) = rank.steps
        rank.steps = [step._replace(step=number, end=step.end + late) for number, late in ((1, 9), (2, 1), (3, 0))]
    write_recording(tmp_path / "recorded", made)
    return tmp_path / "recorded"


def panels(path):
    """Returns the titles of a page's panels and the lengths of their steps."""
    model = json.loads(re.search(r'type="application/json">(.*?)</script>', path.read_text())[1])
    return {panel["title"]: panel["seconds"] for panel in model["panels"]}


def test_a_step_is_drawn_and_its_table_printed(recording, capsys):
    assert main(["view", str(recording)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("measured, step 2: 31, bubble 29.2%")
    assert re.fullmatch(r"rank 0   \|~0000.*\|", lines[1]) and lines[2].startswith("network  |01")
    assert ["gather", "1", "3.2%", "1", "on", "0"] in [line.split() for line in lines]


def test_json_has_the_figures_of_each_step(recording, capsys):
    assert main(["view", str(recording), "--step", "3", "--against", "simulated", "--json"]) == 0
    measured, simulated = json.loads(capsys.readouterr().out)
    assert (measured["source"], measured["step"], simulated["source"]) == ("measured", 3, "simulated")
    assert measured["seconds"] == pytest.approx(simulated["seconds"]) == 30
    assert [rank["reduce"] for rank in measured["by_rank"]] == [2, 2]
    assert measured["mean"]["forward"] == 8 and measured["peak_bytes"] == [0, 0]


def test_a_page_shows_the_step_beside_the_simulated_one_or_another_recording(recording, tmp_path, capsys):
    page, other = tmp_path / "page.html", tmp_path / "other"
    recording.rename(other)
    write_recording(recording, of_simulation(SPEC, simulate(SPEC, build_program(SPEC)), "1"))
    assert main(["view", str(other), "--against", "simulated", "--html", str(page)]) == 0
    assert panels(page) == {f"{other}: measured, step 2": 31, "the same program: simulated": pytest.approx(30)}
    assert main(["view", str(other), "--against", str(recording), "--html", str(page)]) == 0
    assert panels(page) == {f"{other}: measured, step 2": 31, f"{recording}: simulated": 27}
    assert capsys.readouterr().out.splitlines()[-1] == f"written: {page}"


def test_all_steps_go_to_perfetto(recording, tmp_path, capsys):
    trace = tmp_path / "out.pftrace"
    assert main(["view", str(recording), "--perfetto", str(trace)]) == 0
    assert trace.read_bytes() == perfetto_trace(read_recording(recording))
    assert capsys.readouterr().out.splitlines()[-1] == f"written: {trace}"


def test_a_schedule_is_drawn_beside_1f1b_into_a_page(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["schedule", "--html", str(page), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time"] == 105
    assert panels(page) == {
        "1f1b, 1 chunk per pipeline rank, 8 micro-batches": 132,
        "layered, 4 chunks per pipeline rank, 8 micro-batches": 105,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{folder}"], "is no recording: it has no readable recording.json; name a folder that has"),
        (["{recording}", "--step", "9"], "--step is 9, which is not recorded; use one of 1 to 3"),
        (["{recording}", "--step", "0"], "--step: '0' must be a whole number from 1"),
        (["{recording}", "--against", "{folder}"], "is no recording"),
        (["{recording}", "--html", "{folder}"], "which cannot be written (Is a directory); name another file"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_a_sentence(recording, tmp_path, capsys, words, message):
    with pytest.raises(SystemExit) as status:
        main(["view", *(word.format(folder=tmp_path, recording=recording) for word in words)])
    assert status.value.code == 2 and message in capsys.readouterr().err


def test_showing_needs_no_torch(recording):
    code = (
        "import sys; from ds_lgamp.cli.main import main; main(['view', sys.argv[1]]); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, recording], check=True, stdout=subprocess.DEVNULL)
