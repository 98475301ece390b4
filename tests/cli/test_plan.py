"""``ds_lgamp plan --runs``."""

import io
import json
import re

import pytest

from ds_lgamp.cli.main import main
from testing import ROOT

PUBLISHED = ROOT / "benchmarks" / "data" / "vtrain"
ROW = {
    "gpus": "64",
    "global_batch": "512",
    "micro_batch": "8",
    "hidden_size": "3072",
    "attention_heads": "32",
    "layers": "30",
    "sequence_length": "2048",
    "tensor_parallel": "2",
    "data_parallel": "16",
    "pipeline_parallel": "2",
}


@pytest.fixture
def table(tmp_path):
    """Returns a function that writes rows, given by what differs from ROW, and returns the path."""

    def write(*rows: dict[str, str]) -> str:
        columns = list({**ROW, **{column: "" for row in rows for column in row}})
        lines = [",".join(columns), *(",".join({**dict.fromkeys(columns, ""), **ROW, **row}.values()) for row in rows)]
        path = tmp_path / "runs.csv"
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    return write


def seconds(capsys, path: str, cluster: str = "a100") -> list[float]:
    assert main(["plan", "--runs", path, "--cluster", cluster, "--json"]) == 0
    return [run["seconds"] for run in json.loads(capsys.readouterr().out)["runs"]]


def test_each_row_is_predicted_in_its_order(capsys, table):
    slow, fast = seconds(capsys, table({"tensor_parallel": "16", "data_parallel": "2"}, {}))
    assert slow > fast
    assert seconds(capsys, table({}, {"tensor_parallel": "16", "data_parallel": "2"})) == [fast, slow]


def test_parts_of_a_predicted_step_add_up(capsys, table):
    assert main(["plan", "--runs", table({}), "--cluster", "a100", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert sum(run["parts_seconds"].values()) == pytest.approx(run["seconds"]) and 0 < run["mfu"] < 1


@pytest.mark.parametrize(("name", "rows"), [("multi", 73), ("one", 360)])
def test_published_tables_are_predicted_and_their_error_is_told(capsys, name, rows):
    assert main(["plan", "--runs", str(PUBLISHED / f"a100_{name}_node.csv"), "--cluster", "a100"]) == 0
    output, errors = capsys.readouterr()
    assert len(output.splitlines()) == rows + 1 and "seconds  measured" in output
    assert f"{rows} rows are measured: mean absolute error " in errors


def test_a_table_may_come_from_standard_input(capsys, table, monkeypatch):
    with open(table({})) as file:
        monkeypatch.setattr("sys.stdin", io.StringIO("\ufeff" + file.read()))
    assert len(seconds(capsys, "-")) == 1


def test_columns_choose_zero_schedule_chunks_and_vocabulary(capsys, table):
    plain, *others = seconds(
        capsys,
        table(
            {},
            {"zero_stage": "3"},
            {"chunks_per_rank": "3"},
            {"chunks_per_rank": "3", "schedule": "layered", "zero_stage": "3"},
            {"vocabulary_size": "256000"},
            {"recompute": "none"},
            {"fused_attention": "true"},
            {"overlaps": "yes"},
        ),
    )
    outer, interleaved, layered, wide, kept, fused, overlapped = others
    assert outer > plain and layered < outer and wide > plain
    assert max(interleaved, kept, fused, overlapped) < plain


def test_chunks_may_be_called_virtual_stages(capsys, table):
    assert seconds(capsys, table({"virtual_stages": "3"})) == seconds(capsys, table({"chunks_per_rank": "3"}))


def test_an_unknown_column_is_told(capsys, table):
    assert main(["plan", "--runs", table({"colour": "blue"}), "--cluster", "a100", "--json"]) == 0
    assert capsys.readouterr().err == "columns that mean nothing here: colour\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tensor_parallel": "3"},
            "row 2: gpus is 64; tensor_parallel 3 x data_parallel 16 x pipeline_parallel 2 are 96",
        ),
        ({"global_batch": "500"}, "row 2: global_batch is 500; it must be a multiple of .*which is 128"),
        ({"hidden_size": "-3072"}, "row 2: hidden_size is '-3072'"),
        ({"hidden_size": "3073"}, "row 2: attention_heads is 32; it must divide the hidden_size 3073"),
        (
            {"attention_heads": "31"},
            "row 2: attention_heads is 31; it must be a multiple of tensor_parallel, which is 2",
        ),
        ({"layers": ""}, "row 2: layers is ''"),
        ({"layers": "1"}, "row 2: .*1 layers cannot form 2 chunks"),
        ({"zero_stage": "4"}, "row 2: zero_stage is 4"),
        ({"schedule": "eager"}, "row 2: schedule is 'eager'; use layered or"),
        ({"schedule": "1f1b", "chunks_per_rank": "3"}, "row 2: schedule is '1f1b'.*chunks_per_rank"),
        ({"overlaps": "maybe"}, "row 2: overlaps is 'maybe'; use true or"),
        ({"iteration_ms": "-5"}, "row 2: iteration_ms is '-5'"),
        ({"micro_batch": "8,8"}, "row 2: it has more or fewer fields than the head"),
    ],
)
def test_a_wrong_row_is_refused_with_row_and_field(capsys, table, changes, message):
    with pytest.raises(SystemExit) as exit_:
        main(["plan", "--runs", table({}, changes), "--cluster", "a100", "--json"])
    assert exit_.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_missing_columns_files_and_clusters_are_named(capsys, tmp_path, table):
    empty = tmp_path / "empty.csv"
    empty.write_text("gpus\n64\n")
    bare = tmp_path / "bare.csv"
    bare.write_text(",".join(ROW) + "\n")
    for arguments, message in (
        (["--runs", str(bare), "--cluster", "a100"], "the table has no rows"),
        (["--runs", str(empty), "--cluster", "a100"], "lacks the columns global_batch, micro_batch"),
        (["--runs", str(tmp_path / "none.csv"), "--cluster", "a100"], "none.csv"),
        (["--runs", table({}), "--cluster", "a1000"], "cluster is 'a1000'; use a file or one of a100"),
    ):
        with pytest.raises(SystemExit):
            main(["plan", *arguments])
        assert message in capsys.readouterr().err
