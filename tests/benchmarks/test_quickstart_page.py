"""The page of the quickstart's two runs."""

from html import unescape

from benchmarks.quickstart import quickstart_rows
from benchmarks.quickstart_page import losses_picture, quickstart_page
from ds_lgamp.schedule.costs import Durations
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.view.figures import show, simulated_1f1b
from ds_lgamp.view.recording import of_simulation

SPEC = ProgramSpec(place_chunks("modular", 8, 2), "layered", 4, 4, 3)


def recorded():
    recording = of_simulation(SPEC, simulate(SPEC, build_program(SPEC), Durations(gather=1, reduce=2, update=0.5)), "1")
    recording.source = "measured"
    return recording


def test_the_page_has_losses_the_table_and_the_schedules():
    run = {
        "losses": [7.5, 5.25], "collectives_per_step": 7, "messages_per_step": 8, "bytes_per_step": 8_430_000,
        "peak_bytes": 59_700_000, "bubble": 0.125, "step_seconds": 0.69,
    }  # fmt: skip
    summary = {"stock": run, "lgamp": {**run, "step_seconds": 1.01}, "max_loss_difference": 1e-6}
    page = unescape(quickstart_page(summary, quickstart_rows(summary), recorded()))
    assert "<tr><td>seconds per step</td><td>0.69</td><td>1.01</td></tr>" in page
    assert "Largest difference: 1.0e-06." in page and ">7.50</text>" in page and ">5.25</text>" in page
    assert '"ds_lgamp, measured, step 1"' in page and '"1F1B, simulated"' in page


def test_curves_go_down_where_losses_fall_and_span_the_picture():
    first, second = losses_picture({"stock": [3.0, 2.0, 1.0], "lgamp": [3.0, 1.5, 1.0]}).split("<polyline points=")[1:]
    points = [tuple(map(float, point.split(","))) for point in first.split('"')[1].split()]
    assert points == [(44, 8), (298, 110), (552, 212)] and second.split('"')[1].split()[1] == "298.0,161.0"


def test_1f1b_is_simulated_with_the_same_work():
    step = show(recorded())
    plain = show(simulated_1f1b(step))
    # Four chunks of a rank become one: the bubble of two ranks with four micro-batches is a quarter.
    assert plain.recording.program_spec().schedule == "1f1b"
    assert [rank["forward"] for rank in plain.figures.by_rank] == [16, 16]
    assert plain.figures.mean("backward") == step.figures.mean("backward") == 32
    assert plain.figures.by_rank[0]["gather"] == 4 and plain.figures.by_rank[0]["step"] == 2
    assert plain.figures.by_rank[0]["gradient"] + plain.figures.by_rank[1]["activation"] >= 12
