import json
import subprocess
import sys
from dataclasses import replace

import pytest

from ds_lgamp.cli.main import main
from ds_lgamp.schedule.actions import Action
from ds_lgamp.view.recording import read_recording, write_recording

EXAMPLE = (
    "schedule --schedule layered --pipeline-ranks 4 --chunks-per-rank 4 --micro-batches 8 --zero-stage 3 "
    "--resident-chunks 2"
).split()


def report(capsys, *arguments):
    assert main(["schedule", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_the_program_and_its_figures(capsys):
    assert main([*EXAMPLE, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["valid"] is True
    assert result["step_time"] == 105 and result["bubble"] == pytest.approx(3 / 32)
    assert result["gathers"] == [6] * 4 and result["reduces"] == [4] * 4
    assert result["peak_live_activations"] == [31, 29, 27, 25]
    assert sorted(result["program"]) == ["0", "1", "2", "3"]
    for actions in result["program"].values():
        assert [str(Action.parse(text)) for text in actions] == actions and actions[-1] == "STEP"


def test_nothing_is_recomputed_if_that_takes_no_time(capsys):
    pipeline = "--schedule zbv --pipeline-ranks 4 --micro-batches 8 --split-backward".split()
    without, again = report(capsys, *pipeline), report(capsys, *pipeline, "--recompute", "1")
    # Three is what the last rank waits for its first input.
    assert without["step_time"] == 2 * 8 * 3 + 3
    assert again["step_time"] > 2 * 8 * 4 + 3


def test_gantt_is_the_default(capsys):
    assert main(EXAMPLE) == 0
    output = capsys.readouterr().out
    assert [line[:6] for line in output.splitlines()[:4]] == [f"rank {rank}" for rank in range(4)]
    assert "bubble 0.0938" in output


def test_durations_and_groups_change_the_result(capsys):
    plain = report(capsys)
    assert report(capsys, "--hop", "1")["step_time"] > plain["step_time"]
    assert report(capsys, "--backward", "1")["step_time"] < plain["step_time"]
    recomputing = report(capsys, "--recompute", "1")["step_time"] - plain["step_time"]
    assert 0 < recomputing < report(capsys, "--backward", "3")["step_time"] - plain["step_time"], "not the last chunk"
    grouped = report(capsys, "--micro-batch-group", "4")
    assert grouped["gathers"] == [2 * (2 * 4 - 4) + 2] * 4
    assert grouped["peak_live_activations"] == [16, 16, 15, 13]


def test_1f1b_takes_one_contiguous_chunk_per_rank(capsys):
    assert report(capsys, "--schedule", "1f1b")["bubble"] == pytest.approx(3 / 8)


def test_zbv_takes_two_chunks_per_rank_as_a_vee(capsys):
    made = report(capsys, "--schedule", "zbv", "--split-backward", "8")
    assert made["peak_live_activations"] == [8] * 4
    assert {"SEND_F4.0", "SEND_B3.0"} <= set(made["program"]["3"]), "the last rank has the tip of the vee"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "zbv", "--chunks-per-rank", "3"], "needs 2 chunks on each of 4 pipeline ranks"),
        (["--schedule", "zbv", "--placement", "modular"], "it takes two chunks per rank in placement 'vee'"),
        (["--schedule", "1f1b", "--chunks-per-rank", "2"], "; set chunks_per_rank to 1"),
        (["--schedule", "interleaved_1f1b", "--micro-batches", "6"], "multiple of 4 pipeline ranks"),
        (["--micro-batch-group", "some"], "--micro-batch-group: 'some' must be a whole number from 1"),
        (["--pipeline-ranks", "0"], "--pipeline-ranks: '0' must be a whole number from 1"),
        (["--chunks-per-rank", "0"], "--chunks-per-rank: '0' must be a whole number from 1"),
        (["--micro-batches", "0"], "--micro-batches: '0' must be a whole number from 1"),
        (["--hop", "-1"], "--hop is -1"),
        (["--resident-chunks", "0"], "--resident-chunks: '0' must be a whole number from 1"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(capsys, arguments, message):
    with pytest.raises(SystemExit) as status:
        main(["schedule", *arguments])
    assert status.value.code == 2 and message in capsys.readouterr().err


def test_the_command_line_needs_no_torch():
    code = (
        "import sys; from ds_lgamp.cli.main import main; main(['schedule', '--json']); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_collectives_that_take_time_are_drawn_and_those_that_compute_waits_for_told(capsys):
    one_rank = ["--pipeline-ranks", "1", "--chunks-per-rank", "3", "--micro-batches", "2"]
    assert main(["schedule", *one_rank, "--gather", "2", "--reduce", "1"]) == 0
    compute, network, *_, exposed_gathers, exposed_reduces, _ = capsys.readouterr().out.splitlines()
    assert compute == "rank 0   |~~00112CC2CCBBBBAAAA~|"
    assert network == "network  |001122......C00.B...A|"
    assert exposed_gathers == "exposed gather time by rank: [2.0]"
    assert exposed_reduces == "exposed reduce time by rank: [1.0]"
    told = report(capsys, *one_rank, "--gather", "2", "--reduce", "1")
    assert told["exposed_gather_time"] == [2] and told["exposed_reduce_time"] == [1] and told["step_time"] == 21


def test_gathers_run_behind_the_step_or_one_chunk_ahead(capsys):
    one_rank = ["--zero-stage", "1", "--pipeline-ranks", "1", "--chunks-per-rank", "2", "--micro-batches", "1"]
    behind, deferred = (report(capsys, *one_rank, *more)["program"]["0"] for more in ([], ["--defer-gathers"]))
    assert behind[-3:] == ["STEP", "GATHER0", "GATHER1"]
    assert deferred[:3] == ["GATHER0", "GATHER1", "WAIT_GATHER0"] and deferred[-1] == "STEP"


@pytest.mark.parametrize(
    ("updates", "row"),
    [
        ("step", "~~00112CC2CCBBBB~~AAAA~~~~~~~~uuuuuu"),
        ("reduction", "~~00112CC2CCBBBB~~uuAAAAuu~~~~uu"),
        ("next_step", "uuuu00uu112CC2CCBBBB~~AAAA~~~~~~~~"),
    ],
)
def test_updates_are_drawn_where_they_run(capsys, tmp_path, updates, row):
    one_rank = ["--pipeline-ranks", "1", "--chunks-per-rank", "3", "--micro-batches", "2", "--zero-stage", "1"]
    times = ["--gather", "2", "--reduce", "6", "--update", "2", "--updates", updates]
    if updates == "step":
        times.append("--defer-gathers")
    assert report(capsys, *one_rank, *times)["step_time"] == len(row)
    assert main(["schedule", *one_rank, *times, "--svg", str(tmp_path / "picture.svg")]) == 0
    assert f"|{row}|" in (output := capsys.readouterr().out) and "u: update of one chunk" in output
    assert ">update</text>" in (tmp_path / "picture.svg").read_text()


def test_offloading_is_drawn_and_told(capsys):
    """Loads follow updates, and a chunk's first forward its load. Stores follow reductions one compute later."""
    one_rank = ["--pipeline-ranks", "1", "--chunks-per-rank", "3", "--micro-batches", "2"]
    times = ["--offload", "parameters", "--load", "2", "--store", "3", "--update", "1"]
    assert main(["schedule", *one_rank, *times]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "rank 0   |~~~~~00112CC2CCBBBBAAAA~~~~|",
        "loads    |.001122..00................|",
        "stores   |.................CCC.BBBAAA|",
        "updates  |ABC........................|",
    ]
    assert lines[5].startswith("loads: weights of the chunk from the host")
    assert {"loads by rank: [4]", "stores by rank: [3]", "exposed load time by rank: [5.0]"} <= set(lines)
    told = report(capsys, *one_rank, *times)
    assert told["loads"] == [4] and told["stores"] == [3] and told["exposed_store_time"] == [4] and told["valid"]
    assert told["program"]["0"][-3:] == ["UPDATE0", "UPDATE1", "UPDATE2"]
    behind = report(capsys, *one_rank, *times, "--updates", "reduction")["program"]["0"]
    assert behind[-3:] == ["WAIT_STORE0", "UPDATE0", "STEP"]


def test_stages_1_and_2_offload_the_optimizer_only(capsys):
    told = report(capsys, "--offload", "optimizer", "--zero-stage", "2", "--pipeline-ranks", "1")
    assert told["loads"] == [4] and told["program"]["0"][:3] == ["LOAD0", "LOAD1", "WAIT_LOAD0"]


def test_a_forward_beside_anothers_exchanges_takes_less(capsys):
    lasting = ["--forward", "3", "--recompute", "3", "--micro-batches", "2", "--pipeline-ranks", "1"]
    overlapping = [*lasting, "--overlap-exchanges"]
    plain, hidden = (report(capsys, *overlapping, *more) for more in ([], ["--exchange", "1", "--exchanges", "2"]))
    assert "START_F0.1" in hidden["program"]["0"] and "START_B0.1" in hidden["program"]["0"]
    # On three of four chunks, two forwards hide all their exchanges, 1 each, and so do two that are repeated.
    assert plain["step_time"] - hidden["step_time"] == pytest.approx(3 * 2 * 2)
    assert hidden["bubble"] >= 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--exchange", "1"], "--exchange and --exchanges belong to --overlap-exchanges"),
        (["--overlap-exchanges", "--exchange", "2"], "--exchange is 2, a part of --forward 1; use less"),
        (["--load", "1"], "--load and --store belong to --offload"),
        (["--refresh", "1"], "--refresh and --combine belong to --node-shards"),
        (["--offload", "parameters", "--zero-stage", "2"], "offloading of parameters needs 3"),
        (["--offload", "optimizer", "--updates", "step"], 'offloading needs "reduction" or "next_step"'),
        (["--offload", "optimizer", "--node-shards", "refreshed"], "shards of nodes cannot be offloaded"),
    ],
)
def test_impossible_offloading_is_refused(capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(["schedule", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--micro-batches", str(2**40)], f"a step has {2**45:,} forwards and backwards, and at most 500,000"),
        (["--pipeline-ranks", "1000", "--micro-batches", "1000"], "with --pipeline-ranks 1000 and 4 chunks per rank"),
        (["--forward", "1e308", "--backward", "1e308"], "--forward is 1e+308; a duration is a number from 0 to 1e+100"),
        (["--gather", "nan"], "--gather is nan; a duration is a number from 0 to 1e+100"),
    ],
)
def test_what_would_take_minutes_or_all_memory_is_refused(capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(["schedule", *arguments])
    assert message in capsys.readouterr().err


def test_a_simulated_step_is_recorded_as_runs_are(capsys, tmp_path):
    assert main(["schedule", "--hop", "0.5", "--trace", str(tmp_path / "trace")]) == 0
    recording = read_recording(tmp_path / "trace")
    assert recording.source == "simulated"
    assert f"step time {recording.ranks[0].steps[0].end:g}," in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        main(["schedule", "--trace", str(tmp_path / "file")])
    assert "cannot be written (File exists); name another folder" in capsys.readouterr().err


def test_what_a_run_recorded_is_kept(capsys, tmp_path):
    main(["schedule", "--trace", str(tmp_path)])
    measured = replace(read_recording(tmp_path), source="measured")
    write_recording(tmp_path, measured)
    with pytest.raises(SystemExit):
        main(["schedule", "--trace", str(tmp_path)])
    assert "which a run has recorded; name another folder" in capsys.readouterr().err
    assert read_recording(tmp_path).source == "measured"
