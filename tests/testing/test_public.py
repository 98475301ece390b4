"""The runner of public code: its reports, its skips and its exit status. The tests need no tree."""

import json
import subprocess
import sys
from functools import partial
from importlib.machinery import PathFinder
from types import SimpleNamespace

import numpy
import pytest

from testing import SCRIPTS, in_host
from testing.launching import ON_CPU, ROOT, run, torchrun
from testing.public import __main__ as public
from testing.public import stacks
from testing.public.deepspeed_scripts import STAND_INS
from testing.public.deepspeed_tests import Results, compare, results_in
from testing.public.megatron_deepspeed import DOCUMENTS, TOKENS, VOCABULARY, write_text
from testing.public.outcome import (
    Case,
    Outcome,
    by_stage,
    compared,
    markdown,
    outcomes,
    page_block,
    told_by,
    without_block,
)


@pytest.mark.slow
def test_a_script_of_accelerate_trains_with_deepspeed_on_cpus(tmp_path):
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    block = {"pipeline_ranks": 2, "outputs": "all"}
    rest = {"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 2}, "ds_lgamp": block}
    (tmp_path / "ds_config.json").write_text(json.dumps({**sizes, **rest}))
    printed = torchrun(
        2,
        ["-m", "testing.accelerate_cpu", "-m", "ds_lgamp", "run", str(SCRIPTS / "trains_with_accelerate.py")],
        environment={
            **ON_CPU,
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "ds_config.json"),
        },
    )
    assert printed.count("RESULT 2 OutputsEngine") == 2, printed


def part(name, results):
    """Returns a tree's cases with these results. Raises a result that is an AssertionError."""

    def run_case(result):
        if isinstance(result, AssertionError):
            raise result
        return result

    def cases(tree, folder):
        assert folder.is_dir()
        return [Case(f"configuration {index}", partial(run_case, result)) for index, result in enumerate(results)]

    return public.Part(name, "NO_SUCH_VARIABLE", "script.py", cases)


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """Gives the runner these parts, each with a tree."""

    def choose(**results):
        for name in results:
            (tmp_path / name).mkdir()
            (tmp_path / name / "script.py").touch()
        monkeypatch.setattr(public, "PARTS", {name: part(name, found) for name, found in results.items()})
        return [word for name in results for word in (f"--{name}", str(tmp_path / name))]

    return choose


def test_without_trees_every_part_is_skipped_in_the_table(monkeypatch, capsys):
    for each in public.PARTS.values():
        monkeypatch.delenv(each.variable, raising=False)
    assert public.main([]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == len(public.PARTS) == 16
    for row, (name, each) in zip(rows, public.PARTS.items(), strict=True):
        assert f"skipped: no tree; give --{name} or {each.variable}" in row


def test_a_folder_that_is_no_such_tree_is_skipped(tmp_path, capsys):
    assert public.main(["--only", "megatron-lm", "--megatron-lm", str(tmp_path)]) == 0
    assert "skipped: the given folder has no pretrain_gpt.py" in capsys.readouterr().out


def test_an_environment_variable_names_a_tree(monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPSPEED_PATH", str(tmp_path))
    assert public.parse([]).deepspeed == tmp_path
    assert public.parse(["--deepspeed", str(tmp_path / "other")]).deepspeed == tmp_path / "other"


@pytest.mark.parametrize(
    ("result", "status"),
    [
        ("equal", 0),
        ("equal within 1e-07", 0),
        ("passed 3 of 3", 0),
        ("refused: no", 0),
        ("differs: by 1.0e-01", 1),
        ("failed: 1 of 3, test_it", 1),
        (AssertionError("exit status: 1\nValueError: no\n"), 1),
        (AssertionError("exit status: 1\nds_lgamp: stage is 4; use another\n"), 0),
    ],
)
def test_the_exit_status_tells_of_what_differs_or_fails(result, status, parts):
    words = parts(first=["equal", result], second=["equal"])
    assert public.main(words) == status


def test_parts_and_configurations_can_be_chosen(parts, capsys):
    words = parts(first=["equal", "failed: x"], second=["failed: y"])
    assert public.main([*words, "--only", "first", "--matching", "configuration 0"]) == 0
    assert capsys.readouterr().out.count("\n") == 3


def test_the_record_is_what_the_page_shows_and_names_no_folder(parts, tmp_path, capsys):
    words = parts(first=["equal"], second=["refused: a | b"])
    public.main([*words, "--json", str(tmp_path / "found.json")])
    table = capsys.readouterr().out.strip()
    recorded = json.loads((tmp_path / "found.json").read_text())
    assert [outcome["result"] for outcome in recorded["outcomes"]] == ["equal", "refused: a | b"]
    assert str(tmp_path) not in (tmp_path / "found.json").read_text()
    assert recorded["command"] == "python -m testing.public --first DIR --second DIR"
    assert page_block(tmp_path / "found.json").endswith(f":\n\n{table}")
    assert "torch " in page_block(tmp_path / "found.json")
    assert page_block(ROOT / "benchmarks" / "none.json").endswith("testing.public --json benchmarks/none.json`.")


def test_the_table_has_the_commit_of_a_tree(parts, tmp_path, capsys):
    words = parts(first=["equal"])
    assert public.main(words) == 0
    assert "| first | unknown | configuration 0 | equal |" in capsys.readouterr().out
    git = ["git", "-C", str(tmp_path / "first"), "-c", "user.name=x", "-c", "user.email=x"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    public.main(words)
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert f"| first | {commit} | configuration 0 | equal |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("losses", "stock", "result"),
    [
        ([1.0, 0.5], [1.0, 0.5], "equal"),
        ([1.0, 0.5000001], [1.0, 0.5], "equal within 2e-07"),
        ([1.0, 0.6], [1.0, 0.5], "differs: by 2.0e-01"),
        ([1.0, 0.9, 0.8], [1.0, 0.5, 0.2], "differs: by 8.0e-01"),
        ([1.0, float("nan")], [1.0, 0.5], "differs: by nan"),
        ([float("nan"), 0.5], [1.0, 0.5], "differs: by nan"),
        ([1.0], [1.0, 0.5], "differs: 1 losses, stock has 2"),
        ([], [], "differs: 0 losses, stock has 0"),
        ([0.0, 1.0], [0.0, 1.0], "equal"),
    ],
)
def test_losses_are_compared(losses, stock, result):
    assert compared(losses, stock) == result


def test_a_run_without_a_block_that_fails_says_so():
    def fail():
        raise AssertionError("exit status: 1\nValueError: y")

    assert without_block(lambda: [1.0]) == [1.0]
    with pytest.raises(AssertionError) as caught:
        without_block(fail)
    assert told_by(str(caught.value)) == "failed: without a block: ValueError: y"


@pytest.mark.parametrize(
    ("output", "result"),
    [
        ("words\nds_lgamp: schedule is 'x'; use another\nmore", "refused: schedule is 'x'; use another"),
        ("ds_lgamp: steps 1 to 8 are recorded in x\nds_lgamp: no; use y", "refused: no; use y"),
        ("ds_lgamp: steps 1 to 8 are recorded in x\nValueError: z", "failed: ValueError: z"),
        ("ds_lgamp: rank 0 on a failed (KeyError: x); this\n[rank0]: KeyError: x", "failed: KeyError: x"),
        ("[rank1]:ds_lgamp.config.ConfigError: no; use y", "refused: no; use y"),
        ("Traceback\n  File\ntorch.x.SomeError: first\nValueError: second", "failed: torch.x.SomeError: first"),
        (
            "[rank0]: AssertionError: mine\ntorch.distributed.elastic.x.ChildFailedError: \n",
            "failed: AssertionError: mine",
        ),
        ("torch.distributed.elastic.x.ChildFailedError:\nlast", "failed: last"),
        ("without a block: x\nValueError: y", "failed: without a block: ValueError: y"),
        ("exit status: none within 3 seconds\nstep 1\n", "failed: step 1"),
    ],
)
def test_the_output_of_an_ended_run_tells_why(output, result):
    assert told_by(output) == result


PROGRAM = """#!{python}
import json, sys
from pathlib import Path
config, output = sys.argv[sys.argv.index("--deepspeed") + 1], Path(sys.argv[sys.argv.index("--output_dir") + 1])
losses = [1.0, 0.5 if "ds_lgamp" in Path(config).read_text() and {differs} else 0.25]
output = output / "checkpoint-8"
output.mkdir(parents=True)
(output / "trainer_state.json").write_text(json.dumps({{"log_history": [{{"loss": loss}} for loss in losses]}}))
"""


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Writes an environment with a program, which trains other losses with a block or the same, and returns how the
    first case of its stack ends."""
    monkeypatch.setattr(stacks, "write_material", lambda folder: None)

    def end(differs, is_recorded):
        monkeypatch.setattr(stacks, "recorded", lambda folder: is_recorded)
        path = tmp_path / "bin" / "program"
        path.parent.mkdir()
        path.write_text(PROGRAM.format(python=sys.executable, differs=differs))
        path.chmod(0o755)
        stack = stacks.Stack(
            "program",
            "program",
            {"full": stacks.Training({})},
            lambda launcher, _, given: [launcher, *stacks.flags(given)],
        )
        case = next(iter(stacks.cases(stack, tmp_path, tmp_path)))
        return next(iter(outcomes("program", "1", [case], ""))).result

    return end


@pytest.mark.parametrize(
    ("differs", "is_recorded", "result"),
    [
        (False, True, "equal"),
        (True, True, "differs: by 1.0e+00"),
        (False, False, "failed: the program trained, but not with the block"),
    ],
)
def test_a_program_counts_as_equal_only_if_it_trained_with_the_block(differs, is_recorded, result, program):
    assert program(differs, is_recorded) == result


def test_the_version_of_a_program_is_that_in_its_environment(tmp_path):
    info = tmp_path / "lib" / "python3.11" / "site-packages" / "pytest-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pytest\nVersion: 0.1\n")
    assert stacks.version_of("pytest", tmp_path) == "0.1"
    assert stacks.version_of("numpy", tmp_path) == "unknown"


REPORT = """<testsuites><testsuite tests="4">
<testcase classname="a.B" name="good"/><testcase classname="a.C" name="good"/>
<testcase classname="a.B" name="bad"><failure/></testcase><testcase classname="a.B" name="worse"><error/></testcase>
<testcase classname="a.B" name="left"><skipped/></testcase></testsuite></testsuites>"""


def test_results_of_a_trees_own_tests_are_read():
    assert results_in(REPORT) == Results({"B.good", "C.good"}, {"B.bad", "B.worse"}, {"B.left"})


@pytest.mark.parametrize(
    ("failed", "without_block", "result"),
    [
        (set(), set(), "passed 2 of 2, 1 skipped"),
        ({"y"}, set(), "failed: 1 of 3, y"),
        ({"y", "z"}, {"z"}, "failed: 1 of 3, y"),
        ({"z"}, {"z"}, "passed 2 of 2, 1 skipped, 1 fail without a block, too"),
    ],
)
def test_tests_that_fail_without_a_block_too_do_not_count(failed, without_block, result):
    def tests(added):
        assert not added or added["zero_optimization"] == {"stage": 3}
        return Results({"a", "b"}, failed if added else without_block, {"c"})

    assert compare(tests, 3) == result


def test_no_test_at_all_is_a_failure():
    assert compare(lambda added: Results(set(), set(), {"c"}), 0).startswith("failed: 0 of 0")
    alike = Results(set(), {"a", "b"}, set())
    assert compare(lambda added: alike, 0) == "skipped: 2 of 2 fail without a block, too"


def test_a_command_that_takes_too_long_is_ended_and_says_so():
    with pytest.raises(AssertionError, match=r"(?s)exit status: none within 2 seconds.*started"):
        run([sys.executable, "-c", "print('started', flush=True); import time; time.sleep(60)"], 2)


def test_the_block_joins_the_configuration_and_adam_is_torchs():
    config = {
        "grandient_accumulation_steps": 1,
        "zero_optimization": {"stage": 0, "x": 1},
        "optimizer": {"type": "Adam", "params": {"lr": 1}},
    }
    merged = in_host.with_block(config, {"zero_optimization": {"stage": 3}, "ds_lgamp": {}})
    assert merged["zero_optimization"] == {"stage": 3, "x": 1} and merged["ds_lgamp"] == {}
    assert merged.keys() == {"zero_optimization", "optimizer", "ds_lgamp"}
    assert merged["optimizer"]["params"] == {"lr": 1, "torch_adam": True}
    assert config["optimizer"]["params"] == {"lr": 1} and config["zero_optimization"]["stage"] == 0


def test_samples_begin_with_the_last_token_of_the_one_before():
    numbers = numpy.random.default_rng(0)
    sizes = numbers.integers(1, 9, 20).astype(numpy.int32)
    documents = numpy.concatenate([numbers.permutation(20), numbers.permutation(20)]).astype(numpy.int32)
    places = [(place, offset) for place, document in enumerate(documents) for offset in range(sizes[document])]
    found = in_host.sample_index(sizes, documents, 5, 2, int(sizes.sum()))
    assert found.tolist() == [list(places[start]) for start in range(0, len(places), 5)]


def test_the_text_has_the_size_its_index_says(tmp_path):
    write_text(tmp_path / "text")
    tokens = numpy.fromfile(tmp_path / "text.bin", numpy.uint16)
    assert len(tokens) == DOCUMENTS * TOKENS and tokens.max() < VOCABULARY
    index = (tmp_path / "text.idx").read_bytes()
    assert len(index) == 34 + DOCUMENTS * (4 + 8) + 8 * (DOCUMENTS + 1)


def test_what_is_there_is_not_replaced(monkeypatch):
    """A stand-in replaces only modules that the public code lacks."""
    finder, name = in_host._Changed(), "deepspeed.compression.compress"
    monkeypatch.setattr(PathFinder, "find_spec", lambda *_: None)
    made = finder.find_spec(name, None)
    module = SimpleNamespace()
    made.loader.exec_module(module)
    assert module.init_compression is None
    there = SimpleNamespace(loader=None)
    monkeypatch.setattr(PathFinder, "find_spec", lambda *_: there)
    assert finder.find_spec(name, None) is there and there.loader is None
    assert finder.find_spec("json", None) is None


@pytest.mark.parametrize(("by_batches", "found"), [(False, [2.0, 0.5, 3.0, 0.25]), (True, [7.0])])
def test_losses_are_recorded_with_the_norms_of_steps_that_have_one(by_batches, found, monkeypatch, tmp_path):
    monkeypatch.setenv(in_host.LOSSES, str(tmp_path))
    norms = iter([None, 0.5, 0.25])
    engine = SimpleNamespace(
        global_rank=1,
        backward=lambda loss: f"backward of {loss}",
        step=lambda: "stepped",
        train_batch=lambda: 7.0,
        get_global_grad_norm=lambda: next(norms),
    )
    in_host._record(engine, by_batches)
    assert engine.step() == "stepped" and engine.backward(2.0) == "backward of 2.0" and engine.train_batch() == 7.0
    engine.step()
    engine.backward(loss=3.0)
    engine.step()
    assert [float(line) for line in (tmp_path / "1").read_text().splitlines()] == found


def test_the_stand_ins_are_ahead_of_what_is_installed():
    code = (
        "import torchvision, transformers; print(torchvision.__file__, len(torchvision.datasets.FakeData(3, (3,), 2)))"
    )
    words = [sys.executable, "-c", code]
    out = run(words, 300, {"PYTHONPATH": f"{STAND_INS}:{ROOT}"})
    assert str(STAND_INS) in out and out.split()[-1] == "3"


def test_an_outcome_is_a_row():
    table = markdown([Outcome("x", "abc", "P2", "equal", 12.4)])
    assert table.splitlines()[-1] == "| x | abc | P2 | equal | 12 |"


def test_stages_of_a_configuration_share_a_row():
    results = {1: "equal", 3: "refused: y"}
    found = [Outcome("x", "abc", f"P2, ZeRO-{stage}", result, 1.0) for stage, result in results.items()]
    assert by_stage(found).splitlines()[2:] == ["| abc | P2 |  | equal |  | refused: y |"]
