"""The generated blocks and plots of README.md and docs/."""

import pytest

from benchmarks.record import TYPICAL, Record
from docs import plots, tables
from docs.blocks import with_block
from docs.pages import BLOCKS, with_blocks
from docs.screenshot import PICTURE
from testing import ROOT
from testing.ranks import run_on_ranks


@pytest.mark.parametrize("page", BLOCKS)
def test_a_page_is_up_to_date(page):
    text = (ROOT / page).read_text()
    assert with_blocks(page, text) == text, "run python -m docs"


@pytest.mark.parametrize("name", plots.PLOTS)
def test_a_plot_shows_what_is_recorded(name):
    assert plots.digest(name) in plots.path_of(name).read_text(), "run python -m docs"


def test_the_picture_of_the_schedule_is_up_to_date(tmp_path):
    plots.draw_picture(tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_text() == plots.path_of(plots.PICTURE).read_text(), "run python -m docs"


def test_the_picture_of_the_page_is_small_and_on_the_front_page():
    assert PICTURE.stat().st_size < 150_000
    assert PICTURE.relative_to(ROOT).as_posix() in (ROOT / "README.md").read_text()


def test_the_front_page_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_a_page_without_the_block_is_an_error():
    with pytest.raises(ValueError, match="no block 'keys'"):
        with_block("<!-- generated: block -->\n<!-- end -->", "keys", "")


def test_benchmarks_import_nothing_of_the_pages():
    code = "import sys, benchmarks.__main__, benchmarks.quickstart; assert 'docs' not in sys.modules"
    run_on_ranks(1, exec, code)


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.record.RESULTS", tmp_path)
    return tmp_path


def test_tables_show_each_number_in_its_place(results):
    record, config = Record("communication", {}), {"pipeline_ranks": 1, "micro_batches": 8}
    for metric, value in (("gathers", 14), ("reductions", 8), ("collective_bytes", 2_500_000), ("held", 2)):
        record.add(TYPICAL, config, metric, [value], "")
    (results / "communication.json").write_text(record.to_json())
    record = Record("memory", {})
    record.add(TYPICAL, config, "peak", [3_000_000], "bytes")
    record.add(TYPICAL, config, "formula", [4_000_000], "bytes")
    (results / "memory.json").write_text(record.to_json())
    assert tables.communication(1).splitlines()[-1] == f"| {TYPICAL} | 2 | 14 + 8: 2.5 |"
    assert tables.memory(1).splitlines()[-1] == f"| {TYPICAL} | 3.00 (4.00) |"
    assert tables.peers().splitlines()[-1] == f"| 1 x 2 | {TYPICAL} | 2 | 14 | 8 | 2.5 | 3.0 |"


def test_the_table_of_the_fastest_has_ours_beside_the_fastest_peer(results):
    record = Record("training", {})
    config = {"pipeline_ranks": 1, "data_ranks": 2, "width": 4, "recompute": "full", "link": "loopback"}
    kept, sharded = ({**config, "parameters": kind} for kind in ("kept", "sharded"))
    for contender, seconds in (("ds_lgamp, A", 3.0), ("ds_lgamp, B", 2.0), ("peer A", 1.5), ("peer B", 1.0)):
        record.add(contender, kept, "step", [seconds, seconds + 0.2, seconds + 0.1], "s")
        record.add(contender, {**kept, "recompute": "none"}, "step", [0.1], "s")
        record.add(contender, {**kept, "width": 8}, "step", [0.1], "s")
        record.add(contender, kept, "CPU", [0.1], "s")
        record.add(contender, sharded, "step", [0.1], "s")
    (results / "training.json").write_text(record.to_json())
    header, _, *rows = tables.fastest("training", parameters=["kept"]).splitlines()
    assert header == "| links | P x W | parameters | ds_lgamp, s | fastest peer, s |"
    assert rows == ["| loopback | 1 x 2 | kept | B: 2.100 ± 0.100 | peer B: 1.100 ± 0.100 |"]
