"""Runs DeepSpeed's own pipeline tests with a block in the configuration of every PipelineModule they initialise."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from testing.in_host import BLOCK
from testing.launching import run
from testing.public.deepspeed_scripts import host_environment
from testing.public.outcome import Case

PIPE, MODULE, CHECKPOINT = "runtime/pipe/test_pipe.py", "pipe/test_pipe_module.py", "checkpoint/test_pipeline.py"
MOST_RANKS = 4
CHUNKS = {"layers_per_chunk": 1, "placement": "modular"}


class Results(NamedTuple):
    """Names of tests by result."""

    passed: set[str]
    failed: set[str]
    skipped: set[str]


def cases(tree: Path, folder: Path) -> Iterable[Case]:
    """Returns the cases of DeepSpeed's test files. Engine tests run at stages 0 and 3. Module and checkpoint tests run
    at the stages that test most."""
    for tests, stages in ((PIPE, (0, 3)), (MODULE, (3,)), (CHECKPOINT, (1, 3))):
        for stage in stages:
            yield Case(f"unit/{tests}, ZeRO-{stage}", partial(compare, partial(run_tests, tree, tests), stage))


def compare(tests: Callable[[dict[str, Any]], Results], stage: int) -> str:
    """Counts the tests that pass with a block. If some fail, runs the tests without one too."""
    found = tests({"zero_optimization": {"stage": stage}, "ds_lgamp": CHUNKS})
    stock = tests({}) if found.failed else found
    failed = found.failed - stock.failed
    total = len(found.passed) + len(failed)
    if found.failed and not total:
        return f"skipped: {len(found.failed)} of {len(found.failed)} fail without a block, too"
    if failed or not total:
        return f"failed: {len(failed)} of {total}, {', '.join(sorted(failed))}"
    notes = [f", {len(found.skipped)} skipped"] if found.skipped else []
    notes += [f", {len(found.failed)} fail without a block, too"] if found.failed else []
    return f"passed {total} of {total}{''.join(notes)}"


def run_tests(tree: Path, tests: str, added: dict[str, Any], seconds: float = 1800) -> Results:
    """Runs ``tests`` with ``added`` in their configurations. Raises AssertionError if they leave no results."""
    with tempfile.TemporaryDirectory() as folder:
        # The tree's conftest would import the DeepSpeed beside it instead of the installed one.
        (Path(folder) / "tests").symlink_to((tree / "tests").resolve())
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", f"{folder}/results.xml"]
        words.append(f"unit/{tests}")
        variables = {BLOCK: json.dumps(added)} if added else {}
        environment = host_environment(MOST_RANKS, TMPDIR=folder, **variables)
        try:
            run(words, seconds, environment, Path(folder) / "tests")
        except AssertionError:
            # The results include tests that fail. Without results the run itself failed.
            if not Path(folder, "results.xml").exists():
                raise
        return results_in(Path(folder, "results.xml").read_text())


def results_in(report: str) -> Results:
    """Reads pytest's ``report`` in JUnit format."""
    results = Results(set(), set(), set())
    for case in ElementTree.fromstring(report).iter("testcase"):
        kinds = {part.tag for part in case}
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        chosen = results.failed if kinds & {"failure", "error"} else results.passed
        (results.skipped if "skipped" in kinds else chosen).add(name)
    return results
